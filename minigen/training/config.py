"""A config says everything that decides a run: TOML tables, laid over the keys' defaults."""

import os
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import getdoc
from pathlib import Path
from typing import IO, Any, Self

import tomli_w
from pydantic import ValidationError

from minigen.arguments import checked
from minigen.errors import MinigenError, OptionError, likeness, nearest, shown
from minigen.files import explained, opened
from minigen.paths import expand
from minigen.text.documents import passes
from minigen.training.keys import KEYS, TABLES, TEXTS, Tables, described

CONFIG = "config.toml"
"""The file of a run folder that holds its config, and with it where its text lies."""

_MOST_FAULTS = 20  # told in one line

Values = dict[str, Any]  # table name → its keys and values, as TOML gives them


class Config(Tables):
    """Everything that decides a run, checked and frozen; ``config.training.steps`` and so on.

    The keys are those of ``training.keys``; ``minigen config`` shows them. With their defaults:
    """

    @classmethod
    @checked
    def load(
        cls, name_or_path: str | Path = "fables", overrides: Mapping[str, object] | None = None
    ) -> Self:
        """Read a shipped config by name, or a TOML file (ends in ``.toml`` or holds a ``/``).

        ``overrides`` maps dotted keys to values, as ``{"training.steps": 200}``. Relative paths in
        ``corpus.text`` start from the file's folder; in ``overrides``, from the current one.

        Raises OptionError for an unknown name or where only overrides are at fault, MinigenError
        for a file that cannot be read or breaks a rule; all faults stand in one message.
        """
        path = _find(name_or_path)
        tables: Values = {
            table: {name: KEYS[f"{table}.{name}"].default for name in model.model_fields}
            for table, model in TABLES.items()
        }
        for name, table in _read(path).items():
            tables[name] = {**tables.get(name, {}), **table} if isinstance(table, dict) else table
        config = cls.from_dict(tables, str(path), overrides)
        is_of_run = path.name == CONFIG and any(path.parent.glob("step-*.safetensors"))
        if is_of_run and "-" not in config.corpus.text and _is_gone(config.corpus.text, overrides):
            told = lost_text(path.parent)
            raise MinigenError(f"{path}: its run was trained on {told}: give that text with --text")
        return config

    @classmethod
    @checked
    def of_run(cls, folder: Path, overrides: Mapping[str, object] | None = None) -> Self:
        """Read the config of a run folder, with the overrides of ``load``.

        As in ``from_dict``, a key that it lacks means what was before the key existed. A text that
        cannot be read again is ``"external"``, unless an override gives it.
        """
        config = cls._as_written(folder, overrides)
        if _is_gone(config.corpus.text, overrides):
            return config.override({"corpus.text": "external"})
        return config

    @classmethod
    def _as_written(cls, folder: Path, overrides: Mapping[str, object] | None = None) -> Self:
        path = folder / CONFIG
        tables = _read(path, is_own=True)
        if not tables:  # as a power cut may leave it; it is not the config of all defaults
            raise MinigenError(
                f"{path} is empty: put back into it the config that the run had (minigen info "
                f"{shlex.quote(str(folder))} lists it), or train anew with --out"
            )
        return cls.from_dict(tables, str(path), overrides, is_saved=True)

    @classmethod
    @checked
    def from_dict(
        cls,
        tables: Values,
        source: str = "config",
        overrides: Mapping[str, object] | None = None,
        *,
        is_saved: bool = False,
    ) -> Self:
        """Check a whole config, as a checkpoint holds it; ``source`` opens the error message.

        A key that it lacks, since it was saved before the key existed, means what was before. One
        that ``is_saved`` with a run may break what became a rule for those who train later on.
        Relative paths of a text start from the current folder. Raises OptionError where the
        overrides alone are at fault, else MinigenError.
        """
        tables = {name: _absolute(name, table, Path()) for name, table in tables.items()}
        changed = _laid_over(tables, overrides or {})
        is_exempt = is_saved and not _laid_over({}, overrides or {}).keys() & {"training", "model"}
        try:
            return cls.model_validate(changed, context=is_exempt)
        except ValidationError as error:
            faults = error.errors()
            told = list(dict.fromkeys(_sentence(fault, changed) for fault in faults[:_MOST_FAULTS]))
            more = len(faults) - _MOST_FAULTS
            text = "; ".join([*told, f"and {more} more"] if more > 0 else told)
        with suppress(ValidationError):
            if overrides and cls.model_validate(tables, context=is_saved):
                raise OptionError(text)
        raise MinigenError(f"{source}: {text}")

    @checked
    def override(self, overrides: Mapping[str, object]) -> Self:
        """Return a config with some dotted keys changed, checked like any other."""
        return self.from_dict(self.model_dump(), overrides=overrides, is_saved=True)

    def portable(self) -> Values:
        """Return the config as JSON-able tables without a path: what a checkpoint holds.

        A corpus other than the embedded one is ``"external"``.
        """
        tables = self.model_dump(mode="json")
        if self.corpus.text != "fables":
            tables["corpus"]["text"] = "external"
        return tables

    def to_toml(self) -> str:
        """Return the config as a TOML file that ``load`` reads back as the same config."""
        return tomli_w.dumps(
            {
                name: {key: value for key, value in table.items() if value is not None}
                for name, table in self.model_dump(mode="json").items()
            }
        )


def _read_instead(_self: Config, *_: Any, **__: Any) -> None:
    raise OptionError('a config is read: Config.load("fables", overrides={"training.steps": 200})')


Config.__init__ = _read_instead  # type: ignore[assignment]  # reading does without
Config.__doc__ = f"{getdoc(Config)}\n{''.join(map(described, TABLES))}\n"


def located(config: Config, checkpoint: Path) -> Config:
    """Return a checkpoint's config, made to say where its text lies.

    A checkpoint holds no path: an external text is found by the config of its run folder.
    """
    beside = checkpoint.parent / CONFIG
    if config.corpus.text != "external" or not beside.is_file():
        return config
    return config.override({"corpus.text": Config.of_run(checkpoint.parent).corpus.text})


def passing(text: str | Sequence[str]) -> list[str]:
    """Return the paths of a config's text that can be read only once."""
    return [] if isinstance(text, str) else [path for path in text if passes(path)]


def _is_gone(text: str | Sequence[str], overrides: Mapping[str, object] | None) -> bool:
    """Whether the text that a run folder names cannot be read again, and no override gives it."""
    return bool(passing(text)) and "text" not in _laid_over({}, overrides or {}).get("corpus", {})


def lost_text(folder: Path) -> str:
    """Say what text a run was trained on that neither its checkpoint nor its folder leads to."""
    with suppress(MinigenError):  # of a checkpoint alone
        for path in passing(Config._as_written(folder).corpus.text):
            return "standard input" if path == "-" else f"{path}, which cannot be read again"
    return "a text that is not in it"


def differences(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """List each key that differs, dotted, with its value in ``a`` and in ``b``."""
    left, right = a.model_dump(), b.model_dump()
    return [
        (f"{name}.{key}", value, right[name][key])
        for name, table in left.items()
        for key, value in table.items()
        if value != right[name][key]
    ]


def deciding_differences(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """List the keys that differ and decide the weights, with both values.

    The paths of an external text do not, since its SHA-256 is compared; and where the learning rate
    does not decay, neither does the number of steps.
    """
    is_constant = a.optimizer.decay == b.optimizer.decay == "constant"
    return [
        (key, left, right)
        for key, left, right in differences(a, b)
        if KEYS[key].decides_weights
        and (key != "corpus.text" or "fables" in (left, right))
        and not (key == "training.steps" and is_constant)
    ]


def require_same(saved: Config, config: Config) -> None:
    """Refuse to go on with a run in whose config something changed that decides the weights.

    Its steps may be raised, where that decides none; its text is compared when it is read.
    """
    found = deciding_differences(saved, config)
    steps = saved.training.steps, config.training.steps
    if steps[1] < steps[0]:
        found.append(("training.steps", *steps))
    for key, old, new in found:
        if key != "corpus.text" or new == "fables":
            raise MinigenError(
                f"{key} cannot change in a run that goes on (it was {old!r}, got {new!r}): "
                "start a new one with --out"
            )


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``, the value read as TOML; what is not TOML is a string.

    >>> parse_override("training.steps=500")
    ('training.steps', 500)
    >>> parse_override("sampling.prompt=Once upon")
    ('sampling.prompt', 'Once upon')

    Where the key takes a string, anything else that TOML would see in it is one all the same.

    >>> parse_override("sampling.prompt=1984")
    ('sampling.prompt', '1984')
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise OptionError(f"a setting must be KEY=VALUE, as training.steps=500 (got {shown(text)})")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key.strip(), value
    is_meant = isinstance(parsed["value"], str) or key.strip() not in TEXTS
    # A line break could smuggle in a second key.
    return key.strip(), parsed["value"] if len(parsed) == 1 and is_meant else value


def shipped() -> dict[str, Path]:
    """Map the names of the shipped configs to their files: in a wheel, or in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    raise MinigenError(f"there are no configs in {package}: install minigen again (pip install .)")


def _find(name_or_path: str | Path) -> Path:
    name = os.fspath(name_or_path)
    if name.endswith(".safetensors"):
        raise OptionError(
            f"a config must be a name or a TOML file, and {shown(name)} is a model, which minigen "
            "info, verify and generate take"
        )
    if isinstance(name_or_path, Path) or name.endswith(".toml") or "/" in name:
        return Path(expand(name))
    known = shipped()
    if name not in known:
        nearest_first = sorted(known, key=lambda one: -likeness(name, one))
        raise OptionError(
            f"no shipped config is called {shown(name)}: there are {', '.join(nearest_first)}; "
            "the path of a file ends in .toml or holds a /, and that of a text stands behind --text"
        )
    return known[name]


def _read(path: Path, *, is_own: bool = False) -> Values:
    """Return the tables of a file; the paths in them start from its folder."""
    opener: Callable[[Path], IO[bytes]] = opened if is_own else lambda path: path.open("rb")
    with explained(f"cannot read config {path}"), opener(path) as file:
        data = file.read()
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise MinigenError(f"{path}, line {line}: TOML must be UTF-8; save it so") from None
    except (ValueError, RecursionError) as error:
        raise MinigenError(f"{path} is not TOML: {error}") from None
    return {name: _absolute(name, table, path.parent) for name, table in tables.items()}


def _absolute(name: str, table: Any, folder: Path) -> Any:
    text = table.get("text") if name == "corpus" and isinstance(table, dict) else None
    if not isinstance(text, list | tuple):
        return table
    # With its "..", since what is above a link's target only the system knows.
    paths = [
        str((folder / expand(path)).absolute())
        if isinstance(path, str) and path not in ("", "-")
        else path
        for path in text
    ]
    return {**table, "text": paths}


def _laid_over(tables: Values, overrides: Mapping[str, object]) -> Values:
    """Return tables with overrides laid over them: of keys, or of tables ({"training": {…}})."""
    changed = dict(tables)
    for dotted, value in overrides.items():
        if not isinstance(dotted, str) or not dotted.isprintable():  # bytes that are not UTF-8, say
            raise OptionError(f"unknown key {shown(dotted)}: a key is a printable text")
        name, dot, key = dotted.partition(".")
        keys = {key: value} if dot else value
        if not isinstance(keys, Mapping):
            changed[name] = value
        elif isinstance(table := changed.get(name, {}), dict):  # else the file is at fault
            named = {str(key): inner for key, inner in keys.items()}
            changed[name] = {**table, **_absolute(name, named, Path())}
    return changed


def _sentence(fault: Any, tables: Values) -> str:
    """Turn an error of pydantic's into one sentence: the key, the rule, the value, the cure."""
    place = [str(part) for part in fault["loc"]]
    dotted = ".".join(place[:2])
    if fault["type"] == "extra_forbidden":
        if isinstance(tables.get(dotted), dict):
            meant = nearest(dotted, TABLES)
            return f"unknown table {shown(dotted)}: the nearest known one is [{meant}]"
        return unknown_key(dotted)
    if fault["type"] == "missing" and len(place) == 2:
        return f"{dotted} is missing"
    if fault["type"] == "value_error":  # of several keys or of Policy, which say it themselves
        return str(fault["ctx"]["error"])
    if len(place) >= 2:
        return f"{dotted} must be {KEYS[dotted].rule} (got {shown(tables[place[0]][place[1]])})"
    return f"{dotted} must be a table of keys, as [{dotted}] (got {shown(tables[dotted])})"


def unknown_key(dotted: str) -> str:
    """Say that there is no such key, or table, and which is the most like it."""
    *table, name = dotted.split(".")[:2]  # a key of a key's own table is behind them

    def rank(known: str) -> float:
        *known_table, known_name = known.split(".")
        return likeness(name, known_name) + 0.25 * (known_table == table)

    meant = max([*KEYS, *TABLES], key=rank)
    return f"unknown key {shown(dotted)}: the nearest known one is {meant}"
