"""A config says everything that decides a run: TOML tables, laid over the keys' defaults."""

import os
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

import tomli_w
from pydantic import ValidationError

from minigen.arguments import checked
from minigen.errors import MinigenError, OptionError, likeness, nearest, shown
from minigen.files import explained, opened
from minigen.paths import expand
from minigen.training.keys import KEYS, TABLES, TEXTS, Tables, described

CONFIG = "config.toml"
"""The file of a run folder that holds its config, and with it where its text lies."""

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
        tables = defaults()
        for name, table in _read(path).items():
            is_table = isinstance(table, dict)
            tables[name] = {**tables.get(name, {}), **table} if is_table else table
        return cls._build(tables, overrides or {}, source=str(path))

    @classmethod
    @checked
    def of_run(cls, folder: Path, overrides: Mapping[str, object] | None = None) -> Self:
        """Read the config of a run folder, with the overrides of ``load``.

        As in ``from_dict``, a key that it lacks means what was before the key existed.
        """
        path = folder / CONFIG
        tables = _read(path, is_own=True)
        if not tables:  # as a power cut may leave it; it is not the config of all defaults
            raise MinigenError(
                f"{path} is empty: put back into it the config that the run had (minigen info "
                f"{shlex.quote(str(folder))} lists it), or train anew with --out"
            )
        return cls._build(_complete(tables), overrides or {}, source=str(path))

    @classmethod
    @checked
    def from_dict(cls, tables: Values, source: str = "config") -> Self:
        """Check the whole config that a checkpoint holds; ``source`` opens the error message.

        A key that it lacks, since it was saved before the key existed, means what was before.
        """
        return cls._build(_complete(tables), {}, source)

    @checked
    def override(self, overrides: Mapping[str, object]) -> Self:
        """Return a config with some dotted keys changed, checked like any other."""
        return self._build(self.model_dump(), overrides, source="config")

    @classmethod
    def _build(cls, tables: Values, overrides: Mapping[str, object], source: str) -> Self:
        tables, overrides = dict(tables), _flat(overrides)
        for dotted, value in overrides.items():
            name, dot, key = dotted.partition(".")
            table = tables.get(name, {})
            if dot and isinstance(table, dict):
                tables[name] = {**table, **_absolute(name, {key: value}, Path.cwd())}
            elif not dot:
                tables[name] = value
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            faults = dict(_fault(fault, tables) for fault in error.errors())
        text = "; ".join(faults.values())
        if all(_concerns(key, overrides, tables) for key in faults):
            raise OptionError(text)
        raise MinigenError(f"{source}: {text}")

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
Config.__doc__ = f"{Config.__doc__}{''.join(map(described, TABLES))}\n"


def defaults() -> Values:
    """Return the tables of a config that lists nothing."""
    tables: Values = {}
    for dotted, key in KEYS.items():
        table, _, name = dotted.partition(".")
        tables.setdefault(table, {})[name] = key.default
    return tables


def _complete(tables: Values) -> Values:
    """Return saved tables with every table: of the keys in it, their entries know the rest."""
    return {**{name: {} for name in TABLES}, **tables}


def located(config: Config, checkpoint: Path) -> Config:
    """Return a checkpoint's config, made to say where its text lies.

    A checkpoint holds no path: an external text is found by the config of its run folder. Standard
    input cannot be read again.
    """
    beside = checkpoint.parent / CONFIG
    if config.corpus.text != "external" or not beside.is_file():
        return config
    text = Config.of_run(checkpoint.parent).corpus.text
    return config if "-" in text else config.override({"corpus.text": text})


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
        raise OptionError(f"a setting must be KEY=VALUE, as training.steps=500 (got {text!r})")
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
    folders = [package / "configs", package.parent / "configs"]
    folder = next(f for f in folders if f.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _find(name_or_path: str | Path) -> Path:
    name = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith(".toml") or "/" in name:
        return Path(expand(name))
    known = shipped()
    if name not in known:
        nearest_first = sorted(known, key=lambda one: -likeness(name, one))
        raise OptionError(
            f"no shipped config is called {name!r}: there are {', '.join(nearest_first)}; "
            "the path of a file ends in .toml or holds a /"
        )
    return known[name]


def _opened(path: Path, is_own: bool) -> IO[bytes]:
    return opened(path) if is_own else open(path, "rb")


def _read(path: Path, *, is_own: bool = False) -> Values:
    """Return the tables of a file; the paths in them start from its folder."""
    with explained(f"cannot read config {path}"), _opened(path, is_own) as file:
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
    paths = [
        os.path.abspath(folder / expand(path))
        if isinstance(path, str) and path not in ("", "-")
        else path
        for path in text
    ]
    return {**table, "text": paths}


def _fault(fault: Any, tables: Values) -> tuple[str, str]:
    """Turn an error of pydantic's into a key and one sentence: the rule, the value, the cure."""
    place = [str(part) for part in fault["loc"]]
    dotted = ".".join(place[:2])
    if fault["type"] == "extra_forbidden":
        return dotted, _unknown(dotted, tables)
    if fault["type"] == "missing" and len(place) <= 2:
        return dotted, f"{dotted} is missing"
    if len(place) >= 2 and (rule := KEYS[dotted].rule):
        return dotted, f"{dotted} must be {rule} (got {shown(tables[place[0]][place[1]])})"
    if fault["type"] == "value_error":  # of several keys or of Policy, which say it themselves
        return dotted, str(fault["ctx"]["error"])
    return dotted, f"{dotted} must be a table of keys, as [{dotted}] (got {shown(tables[dotted])})"


def _unknown(dotted: str, tables: Values) -> str:
    name, _, key = dotted.partition(".")
    if not key and isinstance(tables[name], dict):
        return f"unknown table {name!r}: the nearest known one is [{nearest(name, TABLES)}]"
    return unknown_key(dotted)


def unknown_key(dotted: str) -> str:
    """Say that there is no such key, or table, and which is the most like it."""
    table, _, name = dotted.rpartition(".")

    def rank(known: str) -> float:
        known_table, _, known_name = known.rpartition(".")
        return likeness(name, known_name) + 0.25 * (known_table == table)

    meant = max([*KEYS, *TABLES], key=rank)
    return f"unknown key {dotted!r}: the nearest known one is {meant}"


def _flat(overrides: Mapping[str, object]) -> dict[str, object]:
    """Return overrides by dotted key, those of a whole table (``{"training": {…}}``) as well."""
    if not isinstance(overrides, Mapping):
        raise OptionError(
            'overrides must map keys to values, as {"training.steps": 200} '
            f"(got {shown(overrides)})"
        )
    flat: dict[str, object] = {}
    for key, value in overrides.items():
        if not isinstance(key, str) or not key.isprintable():  # of bytes that are not UTF-8, say
            raise OptionError(f"unknown key {key!r}: a key is a printable text")
        if "." not in key and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def _concerns(key: str, overrides: Mapping[str, object], tables: Values) -> bool:
    """Whether the fault of a key, a table or (empty) the whole lies in the overrides."""
    if key in overrides:
        return True
    is_table = isinstance(tables.get(key, {}), dict)  # else the file has something else there
    return is_table and any(o.startswith(f"{key}." if key else "") for o in overrides)
