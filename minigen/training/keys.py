"""Every key of a config is one entry: type, range, default, comment, and whether it decides bits.

From the entries follow ``configs/fables.toml``, which ``minigen config`` writes, the errors of
``training.config``, what may change while a run goes on, and what a saved config lacks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from minigen.arguments import endless
from minigen.decoding.policy import OPTIONS, Biases, Policy
from minigen.errors import MinigenError, OptionError, listed, shown
from minigen.model.head import gradient_bits
from minigen.model.rules import OPTIMIZERS

# Exact products keep 16 bits or more of each operand while no sum has more terms than this.
MOST_TERMS = 2**21


_ID = re.compile("[0-9]{1,19}")


class Rule(str):
    """What completes the sentence "KEY must be …": the text of every error of that key."""


STRING = Rule("a string of Unicode")
Integer = Annotated[int, BeforeValidator(endless)]
Count = Annotated[Integer, Field(ge=0, lt=2**63), Rule("an integer from 0 to below 2**63")]
Size = Annotated[Integer, Field(ge=1, le=MOST_TERMS), Rule(f"an integer from 1 to {MOST_TERMS}")]
VocabSize = Annotated[
    Integer, Field(ge=257, le=MOST_TERMS), Rule(f"an integer from 257 to {MOST_TERMS}")
]
Share = Annotated[float, Field(ge=0, lt=1), Rule("a number from 0 to below 1")]
Amount = Annotated[float, Field(ge=0), Rule("a finite number of at least 0")]
Positive = Annotated[float, Field(gt=0), Rule("a finite number above 0")]
Pair = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    Field(strict=False),
    Rule("two numbers from 0 to below 1, as [0.9, 0.99]"),
]
# With a limit pydantic reads a text, and refuses bytes that hide in it: no TOML file can hold them.
String = Annotated[str, Field(min_length=0), STRING]
Paths = Annotated[
    tuple[Annotated[String, Field(min_length=1)], ...], Field(strict=False, min_length=1)
]
CorpusText = Annotated[
    Literal["fables", "external"] | Paths,
    Rule('"fables" or a list of Unicode paths, as ["book.txt"]'),
]
OptimizerName: Any = Literal[tuple(OPTIMIZERS)]


def key(default: Any, comment: str, *, before: Any = ..., **more: Any) -> Any:
    """Return the entry of a key, beside its type; ``more`` is what else a ``Key`` says.

    ``default`` is that of a config which somebody writes. One that was saved with a run lists every
    key that there was: one that it lacks means ``before``, how things were without the key, and is
    at fault where no run was ever saved without it.
    """
    return Field(before, description=comment, json_schema_extra={"default": default, **more})


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __setattr__(self, name: str, value: Any) -> None:
        raise OptionError(
            f"a config is frozen (got {name} = {shown(value)}): config.override("
            f'{{"training.steps": 200}}) returns one that is changed'
        )


class RunTable(_Table):
    """``[run]``: what names the streams."""

    seed: Count = key(0, "Names the streams of random words: init, optimizer, inference.")


class CorpusTable(_Table):
    """``[corpus]``: the text, what a document of it is, and how much is held out."""

    text: CorpusText = key(
        "fables",
        'The text: "fables" is inside the package; paths of files and folders start from this '
        'file\'s folder, and "-" is standard input.',
    )
    documents: Literal["file", "paragraph", "line"] = key(
        "paragraph",
        "What one document is, since no context reaches across two; paragraphs have blank lines "
        "between them. Line ends between documents are no text, nor is a file's byte-order mark.",
    )
    validation_fraction: Share = key(
        0.1,
        "The share of the tokens, at the text's end, that is measured and never trained on.",
        before=0.0,
    )


class TokenizerTable(_Table):
    """``[tokenizer]``: the number of distinct tokens."""

    vocab_size: VocabSize = key(
        896,
        "Number of distinct tokens, V, at most: 256 bytes, <|endoftext|>, and merges learned from "
        "the training part while it has pairs. 257 means bytes only.",
    )


class ModelTable(_Table):
    """``[model]``: the shapes K and D."""

    context_length: Size = key(2, "How many tokens back the model sees, K.")
    embedding_dim: Size = key(
        46,
        "Numbers that stand for one token, D; context_length * embedding_dim may be at most "
        f"{MOST_TERMS}.",
    )

    @model_validator(mode="after")
    def _products_stay_exact(self) -> Self:
        if self.context_length * self.embedding_dim > MOST_TERMS:
            raise ValueError(
                f"model.context_length * model.embedding_dim must be at most {MOST_TERMS}, so that "
                f"sums stay exact (got {self.context_length} * {self.embedding_dim})"
            )
        return self


class TrainingTable(_Table):
    """``[training]``: how many steps, of how many predictions each."""

    steps: Count = key(1000, "Updates of the parameters.")
    batch_size: Size = key(3072, "Predictions per step, N.")
    micro_batches: Size = key(
        1,
        "Parts in which a step's batch is worked through, to save memory.",
        before=1,
        decides_weights=False,
    )


class OptimizerTable(_Table):
    """``[optimizer]``: how a gradient becomes an update."""

    name: OptimizerName = key(
        "adamw",
        "The update rule: "
        + ", ".join(f'"{name}" {rule.comment}' for name, rule in OPTIMIZERS.items())
        + ".",
    )
    learning_rate: Positive = key(0.02, "The peak, reached after the warm-up.")
    betas: Pair = key(
        [0.9, 0.99], "AdamW's decay rates for the averages of the gradient and of its square."
    )
    momentum: Share = key(0.9, "SGD's share of the last update kept in the next.", before=0.0)
    weight_decay: Amount = key(
        1.1,
        "How much of each weight is taken off per step, times the learning rate; 0 is off.",
        before=0.0,
    )
    gradient_clip: Amount = key(
        1.0,
        "The longest gradient (its norm over all parameters) that is used as it is; 0 is off.",
        before=0.0,
    )
    warmup_steps: Count = key(
        50, "Steps over which the learning rate rises linearly to its peak.", before=0
    )
    decay: Literal["constant", "linear", "cosine"] = key(
        "cosine", "How the learning rate falls from its peak to the last step.", before="constant"
    )


class EvaluationTable(_Table):
    """``[evaluation]``: when the validation loss is measured."""

    every: Count = key(
        250,
        "Steps between measurements of the validation loss; 0 is never.",
        before=0,
        decides_weights=False,
    )


class _SamplingTable(_Table):
    """``[sampling]``: when text is sampled, from what prompt, and how each token is chosen."""

    every: Count = key(
        250, "Steps between samples of text; 0 is never.", before=0, decides_weights=False
    )
    prompt: String = key("Once", "What each sample continues.", before="", decides_weights=False)
    max_new_tokens: Size = key(
        100, "How long a sample may become, in tokens.", before=100, decides_weights=False
    )

    @field_validator("*")
    @classmethod
    def _policy_accepts(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if name not in OPTIONS:
            return value
        takes_table = isinstance(OPTIONS[name].kind, Biases)
        if takes_table and isinstance(value, Mapping):  # whose keys, in TOML and JSON, are strings
            value = {int(k) if _ID.fullmatch(str(k)) else k: b for k, b in value.items()}
        try:
            return getattr(Policy(**{name: value}), name)
        except OptionError as error:
            start = "sampling." if str(error).startswith(name) else f"sampling.{name}: "
            raise ValueError(f"{start}{error}") from None

    @property
    def policy(self) -> Policy:
        """The ``Policy`` that these options describe."""
        return Policy(**{name: getattr(self, name) for name in OPTIONS})


def _option(name: str) -> tuple[Any, Any]:
    """Return type and entry of a policy's option, which was off before it existed."""
    option = OPTIONS[name]
    default = 0.5 if name == "temperature" else option.default
    more = {"decides_weights": False, "example": option.example}
    its_type = Annotated[Any, Rule(option.kind.rule)]
    return its_type, key(default, option.help, before=option.default, **more)


if TYPE_CHECKING:

    class SamplingTable(_SamplingTable, Policy):  # type: ignore[misc]  # both are frozen
        """What a type checker sees of it: the keys above and every option of a policy."""

else:  # the list of options has one home, the Policy
    SamplingTable = create_model(
        "SamplingTable", __base__=_SamplingTable, **{name: _option(name) for name in OPTIONS}
    )


class CheckpointTable(_Table):
    """``[checkpoint]``: when the run is saved."""

    every: Count = key(
        500,
        "Steps between checkpoints; the start and the last step are always kept, with 0 they "
        "alone.",
        before=0,
        decides_weights=False,
    )


_SAVED = Field({}, validate_default=True)  # a table that is lacking lacks all of its keys


class Tables(_Table):
    """All tables of a config, and the rules that concern several of them."""

    run: RunTable = _SAVED
    corpus: CorpusTable = _SAVED
    tokenizer: TokenizerTable = _SAVED
    model: ModelTable = _SAVED
    training: TrainingTable = _SAVED
    optimizer: OptimizerTable = _SAVED
    evaluation: EvaluationTable = _SAVED
    sampling: SamplingTable = _SAVED
    checkpoint: CheckpointTable = _SAVED

    @model_validator(mode="after")
    def _tables_agree(self, info: ValidationInfo) -> Self:
        if not info.context:  # one of format 1, which was under no such rule, is used as it is
            gradient_bits(self.training.batch_size, self.model.context_length)
        try:
            self.sampling.policy.check_ids(self.tokenizer.vocab_size)
        except MinigenError as error:
            raise ValueError(f"sampling.{error}") from None
        return self


@dataclass(frozen=True)
class Key:
    """What an entry says: the default is that of a config file which does not list the key.

    ``rule`` completes "KEY must be …"; where the default is "off", ``example`` is a value that
    switches it on.
    """

    default: Any
    comment: str
    rule: str
    decides_weights: bool = True
    example: Any = None


def _rule(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return listed((f'"{name}"' for name in get_args(field.annotation)), "or")
    return next(part for part in field.metadata if isinstance(part, Rule))


TABLES: dict[str, Any] = {name: field.annotation for name, field in Tables.model_fields.items()}
KEYS = {  # dotted name → entry
    f"{table}.{name}": Key(comment=field.description, rule=_rule(field), **field.json_schema_extra)
    for table, model in TABLES.items()
    for name, field in model.model_fields.items()
}
TEXTS = {name for name, entry in KEYS.items() if entry.rule == STRING}


def described(table: str) -> str:
    """Return a line for each key of a table, for the docstrings that ``help()`` shows."""
    names = [name for name in KEYS if name.startswith(f"{table}.")]
    return "".join(f"\n{name} = {KEYS[name].default!r}: {KEYS[name].comment}" for name in names)


for _name, _table in TABLES.items():
    _table.__doc__ = f"{_table.__doc__}\n\nThe keys, with their defaults:\n{described(_name)}"
