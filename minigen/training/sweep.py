"""A sweep trains one config with every combination of some values, for each of some seeds.

Each run has a sub-folder of its own and is the run that ``minigen train`` would make of its config.
One file of the sweep's own says what was planned, for the runs whose folders cannot tell any more.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import product
from math import inf, prod
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from minigen import files
from minigen.arguments import checked
from minigen.errors import MinigenError, OptionError, shown
from minigen.files import write_atomically
from minigen.training import logs
from minigen.training.config import CONFIG, Config, differences, parse_override, passing
from minigen.training.folder import RunFolder, examined, require_empty

SEED = "run.seed"
MOST_RUNS = 10_000
_LONGEST_NAME = 150  # of a folder: file systems hold 255 bytes
PLAN = ".sweep.json"  # the config of the first run, and what the others have otherwise
_TAIL = 1 << 16  # bytes in which the last line of a log stands

Axes = Mapping[str, Mapping[str, object]]
"""Key → its values, as they were written and as they were meant."""


# ── What was asked for ───────────────────────────────────────────────────────────────────────────


def split_values(text: str) -> list[str]:
    """Split at commas, but not at those inside a TOML value.

    >>> split_values('[0.9, 0.99], [0.8, 0.9]')
    ['[0.9, 0.99]', '[0.8, 0.9]']
    """
    pieces, values = text.split(","), []
    while pieces:
        value = pieces.pop(0)
        if value.strip().startswith(("[", "{", '"', "'")):
            wholes = (",".join([value, *pieces[:n]]) for n in range(len(pieces) + 1))
            are_toml = (one for one in wholes if parse_override(f"value={one}")[1] != one)
            value = next(are_toml, value)
            del pieces[: value.count(",")]
        values.append(value.strip())
    return values


def parse_axes(settings: Sequence[str]) -> Axes:
    """Read settings ``KEY=VALUE,VALUE,…``, each value TOML. Raises OptionError for a malformed one.

    >>> parse_axes(["optimizer.learning_rate=0.003,0.01"])
    {'optimizer.learning_rate': {'0.003': 0.003, '0.01': 0.01}}
    """
    axes: dict[str, dict[str, object]] = {}
    for setting in settings:
        key = parse_override(setting)[0]
        texts = split_values(setting.partition("=")[2])
        if key in axes:
            raise OptionError(f"{key} must be set once, with all values (got {shown(setting)} too)")
        if len(texts) > 1 and "" in texts:
            raise OptionError(
                f"there must be a value before and after each comma (got {shown(setting)}); "
                "a text with a comma stands in quotes"
            )
        meant = [parse_override(f"{key}={text}")[1] for text in texts]
        if any(meant.count(value) > 1 for value in meant):
            raise OptionError(f"{key} must have each value once (got {shown(setting)})")
        axes[key] = dict(zip(texts, meant, strict=True))
    return axes


def parse_seeds(text: str) -> range:
    """Read seeds: ``0:5`` is 0, 1, 2, 3, 4, and ``7`` is 7 alone.

    >>> list(parse_seeds("0:5"))
    [0, 1, 2, 3, 4]
    """
    match = re.fullmatch(r"(\d{1,19})(?::(\d{1,19}))?", text, re.ASCII)
    first = int(match[1]) if match else 0
    seeds = range(first, int(match[2] or first + 1) if match else 0)
    count = seeds.stop - seeds.start  # Python counts no range of 2^63 and more
    if count > MOST_RUNS:
        raise OptionError(f"a sweep may have at most {MOST_RUNS} runs (got {count})")
    if not seeds:
        raise OptionError(
            f"--seeds must be START:STOP, as 0:5 for 0, 1, 2, 3, 4, or one seed (got {shown(text)})"
        )
    return seeds


def plan(config: Config, axes: Axes, seeds: Sequence[int]) -> dict[str, Config]:
    """Name a run for each combination of values and each seed: sub-folder → its config.

    Raises OptionError where a value breaks a rule, so that no run is left to find out.
    """
    for path in passing(config.corpus.text):
        raise OptionError(f"each run of a sweep reads its text, so it must be files (got {path})")
    if named := [key for key in axes if key in (SEED, SEED.partition(".")[0])]:
        raise OptionError(f"seeds are set with --seeds, as --seeds 0:5 (got values of {named[0]})")
    count = len(seeds) * prod(len(values) for values in axes.values())
    if count > MOST_RUNS:
        raise OptionError(f"a sweep may have at most {MOST_RUNS} runs (got {count})")
    if not count:
        raise OptionError("a sweep must have a run: give each key a value, and one seed (got none)")
    runs = {}
    for texts in product(*axes.values()):
        chosen = dict(zip(axes, texts, strict=True))
        varied = [f"{key}={text}" for key, text in chosen.items() if len(axes[key]) > 1]
        changes = {key: axes[key][text] for key, text in chosen.items()}
        for seed in seeds:
            name = _folder_name(",".join([*varied, f"seed={seed}"]))
            runs[name] = config.override({**changes, SEED: seed})
    if len({one.model_dump_json() for one in runs.values()}) < len(runs):
        raise OptionError(
            "each run must have a config of its own: a key and its table may not both be set (got "
            f"{', '.join(axes)})"
        )
    return runs


def _folder_name(name: str) -> str:
    """Keep what any file system holds; a digest tells apart what would look alike."""
    safe = re.sub(r"[^\w.+=,\[\]-]", "_", name, flags=re.ASCII)
    if safe == name and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{safe[:_LONGEST_NAME]}-{digest}"


# ── What stands in the folder ────────────────────────────────────────────────────────────────────


def create(path: Path, runs: Mapping[str, Config]) -> files.Ownership | None:
    """Plan runs in a folder, new or empty, and make a sub-folder with its config for each.

    The plan is one file, there or not; what a kill leaves unmade, ``mend`` makes. The folder itself
    stays what it is: a mount point, one behind a link, one with its own rights. Returns what must
    be kept as long as the folder is to be this process's.
    """
    is_new = not path.exists()
    try:
        with files.explained(f"cannot make folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
        owned = files.own(path)
        require_empty(path)
        _write_plan(path, runs)
        for name, config in runs.items():
            mend(path / name, config)
        return owned
    finally:
        if is_new:
            with suppress(OSError):  # it is in use
                path.rmdir()


def _write_plan(path: Path, runs: Mapping[str, Config]) -> None:
    first = next(iter(runs.values()))
    changes = {
        name: {key: value for key, _, value in differences(first, config)}
        for name, config in runs.items()
    }
    text = json.dumps({"config": first.model_dump(), "runs": changes})
    write_atomically(path / PLAN, text.encode())


def _read_plan(path: Path) -> dict[str, Config]:
    """Return what was planned: sub-folder → config; nothing in a sweep of before there was a plan.

    Raises MinigenError where the file is damaged, or cannot be read.
    """
    try:
        with files.opened(path / PLAN) as file:
            data = file.read()
    except FileNotFoundError:
        return {}
    try:
        plan = json.loads(data)
        first = Config.from_dict(plan["config"])
        runs = {name: first.override(changes) for name, changes in plan["runs"].items()}
        if any(_folder_name(name) != name or name.startswith(".") for name in runs):
            raise ValueError
    except (MinigenError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MinigenError(
            f"{path / PLAN} is damaged: remove it, to go on with the runs that are there"
        ) from None
    return runs


def find(path: Path) -> dict[Path, Config]:
    """Return the runs of a sweep's folder, planned or there: sub-folder → config.

    Raises MinigenError where there is none.
    """
    planned = _read_plan(path) if path.is_dir() else {}
    there = {config.parent.name for config in path.glob(f"[!.]*/{CONFIG}")}
    if not planned and not there:
        raise MinigenError(f"{path} holds no sweep to resume: sweep without --resume")
    runs = {}
    for name in sorted(there | planned.keys()):
        try:
            runs[path / name] = Config.of_run(path / name)
        except MinigenError:
            if name not in planned:
                raise
            runs[path / name] = planned[name]
    return runs


def mend(folder: Path, config: Config) -> str:
    """Make a run's folder fit to be trained in; say what was wrong with it, if anything.

    What is of no use is set aside, under its name with ``.aside`` behind, and the run goes on from
    what is left: from its last sound checkpoint whose logs are whole. Raises MinigenError where
    another process trains in it.
    """
    with files.explained(f"cannot mend {folder}"):
        if is_gone := not folder.exists():
            folder.mkdir()
        owned = files.own(folder)  # while it is looked at: nobody else trains in it
        try:
            return _mend(folder, config, ["its folder is gone"] * is_gone)
        finally:
            del owned  # now, whatever keeps this frame: another process is to train in the folder


def _mend(folder: Path, config: Config, faults: list[str]) -> str:
    try:
        Config.of_run(folder)
    except MinigenError as error:
        if os.path.lexists(folder / CONFIG):
            faults.append(str(error))
            (folder / CONFIG).replace(_aside(folder / CONFIG))
        elif not faults:
            faults.append(f"its {CONFIG} is gone")
        write_atomically(folder / CONFIG, config.to_toml().encode())
    for name in logs.LOGS:
        try:
            logs.require_own(folder / name)
        except MinigenError as error:
            faults.append(str(error))
            (folder / name).replace(_aside(folder / name))
    vouched: Mapping[str, logs.State] | None = dict.fromkeys(logs.VOUCHED, logs.NO_LOG)
    doubts: list[str] = []
    for path, saved, fault in examined(folder):
        if saved and not fault:
            vouched = saved.logs
            break
        (doubts if saved else faults).append(fault)
        path.replace(_aside(path))
    for name, state in (vouched or {}).items() if doubts else ():
        if (folder / name).exists():
            shutil.copy(folder / name, _aside(folder / name))
            logs.Log(folder / name, state["bytes"])
    return "; ".join(faults + doubts[:1])


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.aside")


def is_done(folder: Path, config: Config) -> bool:
    """Whether a run has come to its end: its last checkpoint is there."""
    return (folder / f"step-{config.training.steps:06d}.safetensors").is_file()


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the last whole line of a run's metrics; nothing where it has none yet."""
    with (
        suppress(OSError, MinigenError, ValueError, IndexError),
        files.opened(folder / logs.METRICS) as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        return logs.parse(file.read().split(b"\n")[-2])
    return {}


@checked
def sweep(
    config: Config,
    values: Mapping[str, Sequence[object]],
    *,
    out: str | Path,
    seeds: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Train a config with every combination of values, for each seed, in folders of ``out``.

    ``values`` maps a dotted key to its values; ``seeds`` defaults to the config's own. Runs that
    are done in ``out`` are not trained again, so that calling it once more goes on. Returns what
    each run came to: its folder, seed, values, and the last line of its metrics.
    """
    axes = {key: {_text(value): value for value in several} for key, several in values.items()}
    for key, several in values.items():
        if len(axes[key]) < len(several):
            raise OptionError(f"{key} must have each value once (got {shown(several)})")
    runs = plan(config, axes, [config.run.seed] if seeds is None else seeds)
    path = Path(out)
    if not (path / PLAN).exists() and not any((path / name).exists() for name in runs):
        _owned = create(path, runs)
    else:
        _owned = files.own(path)
    planned = _read_plan(path)
    if runs.keys() - planned.keys():
        _write_plan(path, {**planned, **runs})
    results = []
    for name, one in runs.items():
        folder = path / name
        if (fault := mend(folder, one)) and name in planned:
            # One level more than usual, since ``checked`` stands between.
            warnings.warn(f"{name}: {fault}: it is trained again", stacklevel=3)
        # Only the folder of this very run is taken as it is: else resuming says what differs.
        if not is_done(folder, one) or Config.of_run(folder) != one:
            for _ in RunFolder.resume(folder, one).steps():
                pass
        changed = {key: reduce(getattr, key.split("."), one) for key in (SEED, *values)}
        results.append({"folder": folder, **changed, **last_metrics(folder)})
    return results


# ── What came of it ──────────────────────────────────────────────────────────────────────────────


def table(runs: Mapping[Path, Config]) -> list[list[str]]:
    """Return the final losses by the values that differ, over the seeds of each: head and rows.

    A loss is in nats per token, as mean ± standard deviation of a sample; a run that has not come
    to its end does not count.
    """
    first = next(iter(runs.values()))
    keys = {key for config in runs.values() for key, _, _ in differences(first, config)} - {SEED}
    groups: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {}  # values, and the ends of runs
    for folder, config in runs.items():
        point = [reduce(getattr, key.split("."), config) for key in sorted(keys)]
        ends = groups.setdefault(str(point), (point, []))[1]
        ends += [last_metrics(folder)] if is_done(folder, config) else []
    rows = [[*sorted(keys), "seeds", "loss", "validation loss"]]
    for point, ends in sorted(groups.values(), key=lambda group: [*map(_rank, group[0])]):
        losses = (
            [end[name] for end in ends if name in end] for name in ("loss", "validation_loss")
        )
        rows.append([*map(_text, point), str(len(ends)), *map(_summary, losses)])
    return rows


def _rank(value: object) -> tuple[float, str]:
    """Return what values are sorted by: numbers first."""
    number = float(value) if isinstance(value, int | float) else inf
    return number, str(value)


def _text(value: object) -> str:
    if isinstance(value, float):  # shorter where that is the same number
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(list(value) if isinstance(value, tuple) else value)


def _summary(losses: list[float]) -> str:
    spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{mean(losses):.4f}{spread}" if losses else "-"
