"""A config says everything that decides a run: typed TOML tables, laid over `fables.toml`."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from minigen.decoding.policy import Policy
from minigen.errors import MinigenError, OptionError

# Exact products keep 16 bits or more of each operand while no sum has more terms than this.
MOST_TERMS = 2**21

Tables = dict[str, Any]  # table name → its keys and values, as TOML gives them
POLICY_OPTIONS = tuple(option.name for option in fields(Policy))


def _unicode(text: str) -> str:
    text.encode()  # fails for bytes that hide in a str as surrogates: no TOML file can hold them
    return text


# A description completes the sentence "KEY must be …": it is the text of every error of that key.
Count = Annotated[
    int, Field(ge=0, lt=2**63, description="an integer of at least 0 (and below 2**63, as in TOML)")
]
Size = Annotated[int, Field(ge=1, le=MOST_TERMS, description=f"an integer from 1 to {MOST_TERMS}")]
Share = Annotated[float, Field(ge=0, lt=1, description="a number from 0 to below 1")]
Amount = Annotated[float, Field(ge=0, description="a finite number of at least 0")]
Pair = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    Field(strict=False, description="two numbers from 0 to below 1, as [0.9, 0.99]"),
]
Text = Annotated[str, AfterValidator(_unicode), Field(description="a string of Unicode")]
Paths = Annotated[
    tuple[Annotated[Text, Field(min_length=1)], ...], Field(strict=False, min_length=1)
]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunTable(_Table):
    """`[run]`: what names the streams."""

    seed: Count


class CorpusTable(_Table):
    """`[corpus]`: the text, what a document of it is, and how much is held out."""

    text: Annotated[
        Literal["fables", "external"] | Paths,
        Field(description='"fables" or a list of Unicode paths, as ["book.txt"]'),
    ]
    documents: Annotated[
        Literal["file", "paragraph", "line"],
        Field(description='"file", "paragraph" or "line"'),
    ]
    validation_fraction: Share


class TokenizerTable(_Table):
    """`[tokenizer]`: the number of distinct tokens."""

    vocab_size: Annotated[
        int,
        Field(
            ge=257,
            le=MOST_TERMS,
            description=f"an integer from 257 (bytes and <|endoftext|>) to {MOST_TERMS}",
        ),
    ]


class ModelTable(_Table):
    """`[model]`: the shapes K and D."""

    context_length: Size
    embedding_dim: Size

    @model_validator(mode="after")
    def _products_stay_exact(self) -> Self:
        if self.context_length * self.embedding_dim > MOST_TERMS:
            raise ValueError(
                f"model.context_length * model.embedding_dim must be at most {MOST_TERMS}, so that "
                f"sums stay exact (got {self.context_length} * {self.embedding_dim})"
            )
        return self


class TrainingTable(_Table):
    """`[training]`: how many steps, of how many predictions each."""

    steps: Count
    batch_size: Size
    micro_batches: Size


class OptimizerTable(_Table):
    """`[optimizer]`: how a gradient becomes an update."""

    name: Annotated[Literal["adamw", "sgd"], Field(description='"adamw" or "sgd"')]
    learning_rate: Annotated[float, Field(gt=0, description="a finite number above 0")]
    betas: Pair
    momentum: Share
    weight_decay: Amount
    gradient_clip: Amount
    warmup_steps: Count
    decay: Annotated[
        Literal["constant", "linear", "cosine"],
        Field(description='"constant", "linear" or "cosine"'),
    ]


class EvaluationTable(_Table):
    """`[evaluation]`: when the validation loss is measured."""

    every: Count


class _SamplingTable(_Table):
    """`[sampling]`: when text is sampled, from what prompt, and every option of a `Policy`."""

    every: Count
    prompt: Text
    max_new_tokens: Size

    @field_validator("*")
    @classmethod
    def _policy_accepts(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if name not in POLICY_OPTIONS:
            return value
        if name == "logit_bias" and isinstance(value, Mapping):  # keys of TOML and JSON are strings
            value = {int(k) if str(k).isdecimal() else k: bias for k, bias in value.items()}
        try:
            return getattr(Policy(**{name: value}), name)
        except OptionError as error:
            start = "sampling." if str(error).startswith(name) else f"sampling.{name}: "
            raise ValueError(f"{start}{error}") from None
        except (AttributeError, TypeError):
            kind = "list of token ids" if name == "suppress_tokens" else 'table, as {"65" = 1.5}'
            raise ValueError(f"sampling.{name} must be a {kind} (got {_shown(value)})") from None

    @property
    def policy(self) -> Policy:
        """The `Policy` that these options describe."""
        return Policy(**{name: getattr(self, name) for name in POLICY_OPTIONS})


if TYPE_CHECKING:
    SamplingTable = _SamplingTable
else:  # the list of options has one home, the Policy
    SamplingTable = create_model(
        "SamplingTable",
        __base__=_SamplingTable,
        **{name: (Any, getattr(Policy(), name)) for name in POLICY_OPTIONS},
    )


class CheckpointTable(_Table):
    """`[checkpoint]`: when the run is saved."""

    every: Count


class Config(_Table):
    """Everything that decides a run, checked and frozen; `config.training.steps` and so on.

    The keys and their meaning are in `configs/fables.toml`, which also holds every default.
    """

    run: RunTable
    corpus: CorpusTable
    tokenizer: TokenizerTable
    model: ModelTable
    training: TrainingTable
    optimizer: OptimizerTable
    evaluation: EvaluationTable
    sampling: SamplingTable
    checkpoint: CheckpointTable

    @model_validator(mode="after")
    def _tokens_exist(self) -> Self:
        policy, size = self.sampling.policy, self.tokenizer.vocab_size
        for option, ids in (
            ("suppress_tokens", policy.suppress_tokens),
            ("logit_bias", policy.logit_bias),
        ):
            if missing := [i for i in ids if i >= size]:
                raise ValueError(
                    f"sampling.{option} must name token ids below tokenizer.vocab_size = {size} "
                    f"(got {missing[0]})"
                )
        return self

    @classmethod
    def load(
        cls, name_or_path: str | Path = "fables", overrides: Mapping[str, object] | None = None
    ) -> Self:
        """Read a shipped config by name, or a TOML file (ends in `.toml` or holds a `/`).

        `overrides` maps dotted keys to values, as `{"training.steps": 200}`. Relative paths in
        `corpus.text` start from the file's folder; in `overrides`, from the current one.

        Raises OptionError for an unknown name or where only overrides are at fault, MinigenError
        for a file that cannot be read or breaks a rule; all faults stand in one message.
        """
        path = _find(name_or_path)
        tables = _read(_shipped()["fables"])
        for name, table in _read(path).items():
            if isinstance(table, dict):
                table = _absolute(name, table, path.parent)
                tables[name] = {**tables.get(name, {}), **table}
            else:
                tables[name] = table
        return cls._build(tables, overrides or {}, source=str(path))

    @classmethod
    def from_dict(cls, tables: Tables, source: str = "config") -> Self:
        """Check the whole config that a checkpoint holds; `source` opens the error message."""
        return cls._build(tables, {}, source)

    def override(self, overrides: Mapping[str, object]) -> Self:
        """Return a config with some dotted keys changed, checked like any other."""
        return self._build(self.model_dump(), overrides, source="config")

    @classmethod
    def _build(cls, tables: Tables, overrides: Mapping[str, object], source: str) -> Self:
        tables = dict(tables)
        for dotted, value in overrides.items():
            name, dot, key = dotted.partition(".")
            if dot:
                table = tables.get(name)
                change = _absolute(name, {key: value}, Path.cwd())
                tables[name] = {**(table if isinstance(table, dict) else {}), **change}
            else:
                tables[name] = value
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            faults = _faults(error, tables)
        text = "; ".join(faults.values())
        if all(_concerns(key, overrides) for key in faults):
            raise OptionError(text)
        raise MinigenError(f"{source}: {text}")

    def portable(self) -> Tables:
        """Return the config as JSON-able tables without a path: what a checkpoint holds.

        A corpus other than the embedded one is `"external"`.
        """
        tables = self.model_dump(mode="json")
        if self.corpus.text != "fables":
            tables["corpus"]["text"] = "external"
        return tables

    def to_toml(self) -> str:
        """Return the config as a TOML file that `load` reads back as the same config."""
        return tomli_w.dumps(
            {
                name: {key: value for key, value in table.items() if value is not None}
                for name, table in self.model_dump(mode="json").items()
            }
        )


def differences(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """List each key that differs, dotted, with its value in `a` and in `b`."""
    left, right = a.model_dump(), b.model_dump()
    return [
        (f"{name}.{key}", value, right[name][key])
        for name, table in left.items()
        for key, value in table.items()
        if value != right[name][key]
    ]


def parse_override(text: str) -> tuple[str, Any]:
    """Split `KEY=VALUE`, the value read as TOML; what is not TOML is a string.

    >>> parse_override("training.steps=500")
    ('training.steps', 500)
    >>> parse_override("sampling.prompt=Once upon")
    ('sampling.prompt', 'Once upon')
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise OptionError(f"a setting must be KEY=VALUE, as training.steps=500 (got {text!r})")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key.strip(), value
    # A line break could smuggle in a second key.
    return key.strip(), parsed["value"] if len(parsed) == 1 else value


def _shipped() -> dict[str, Path]:
    """Map the names of the shipped configs to their files: in a wheel, or in a checkout."""
    package = Path(__file__).parents[1]
    folders = [package / "configs", package.parent / "configs"]
    folder = next(f for f in folders if f.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _find(name_or_path: str | Path) -> Path:
    name = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith(".toml") or "/" in name:
        return Path(name)
    shipped = _shipped()
    if name not in shipped:
        nearest_first = sorted(shipped, key=lambda known: -_likeness(name, known))
        raise OptionError(
            f"no shipped config is called {name!r}: there are {', '.join(nearest_first)}; "
            "the path of a file ends in .toml or holds a /"
        )
    return shipped[name]


def _read(path: Path) -> Tables:
    try:
        data = path.read_bytes()
        return tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise MinigenError(f"cannot read config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise MinigenError(f"{path}, line {line}: TOML must be UTF-8; save it so") from None
    except (ValueError, RecursionError) as error:
        raise MinigenError(f"{path} is not TOML: {error}") from None


def _absolute(name: str, table: Tables, folder: Path) -> Tables:
    text = table.get("text") if name == "corpus" else None
    if not isinstance(text, list | tuple):
        return table
    paths = [
        os.path.abspath(folder / path) if isinstance(path, str) and path not in ("", "-") else path
        for path in text
    ]
    return {**table, "text": paths}


def _faults(error: ValidationError, tables: Tables) -> dict[str, str]:
    """Turn pydantic's errors into one sentence a key: the rule, the value, the cure."""
    faults = {}
    for fault in error.errors():
        place = [str(part) for part in fault["loc"]]
        dotted = ".".join(place[:2])
        if fault["type"] == "extra_forbidden":
            sentence = _unknown(dotted, tables)
        elif fault["type"] == "missing" and len(place) <= 2:
            sentence = f"{dotted} is missing"
        elif len(place) < 2 and fault["type"] != "value_error":
            value = _shown(tables[dotted])
            sentence = f"{dotted} must be a table of keys, as [{dotted}] (got {value})"
        elif len(place) >= 2 and (rule := _tables()[place[0]].model_fields[place[1]].description):
            value = _shown(tables[place[0]][place[1]])
            sentence = f"{dotted} must be {rule} (got {value})"
        else:  # a rule of several keys or of Policy, which brings its own sentence
            sentence = str(fault["ctx"]["error"])
        faults[dotted] = sentence
    return faults


def _unknown(dotted: str, tables: Tables) -> str:
    name, _, key = dotted.partition(".")
    if not key and isinstance(tables[name], dict):
        nearest = max(_tables(), key=lambda table: _likeness(name, table))
        return f"unknown table {name!r}: the nearest known one is [{nearest}]"
    _, nearest = max(
        # A key of the same table counts as a little more alike.
        (_likeness(key or name, known) + 0.25 * (table == name), f"{table}.{known}")
        for table, model in _tables().items()
        for known in model.model_fields
    )
    return f"unknown key {dotted!r}: the nearest known one is {nearest}"


def _tables() -> dict[str, type[BaseModel]]:
    annotations = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: table for name, table in annotations.items() if isinstance(table, type)}


def _likeness(word: str, known: str) -> float:
    return difflib.SequenceMatcher(None, word, known).ratio()


def _concerns(key: str, overrides: Mapping[str, object]) -> bool:
    """Whether the fault of a key, a table or (empty) the whole lies in the overrides."""
    return any(o == key or o.startswith(f"{key}." if key else "") for o in overrides)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python shows no integer of more than 4300 digits
        text = "a number too long to show"
    return text if len(text) <= 80 else text[:77] + "..."
