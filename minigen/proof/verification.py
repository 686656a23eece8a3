"""Verification: a run is trained again, segment by segment, and every bit of it compared.

A segment is what lies between two checkpoints. Each starts from a file and must arrive at the next
one, so that segments have nothing to do with each other; the first one starts from the config.
"""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from minigen.arguments import checked
from minigen.errors import MinigenError, OptionError
from minigen.exact.streams import Stream
from minigen.proof.laboratory import kept_text, temporary_folder
from minigen.text.documents import Progress
from minigen.training import checkpoint
from minigen.training.config import CONFIG, Config, deciding_differences, located, lost_text
from minigen.training.logs import METRICS, fault, read_lines
from minigen.training.run import Run, StepRecord

WORTH_PROCESSES = 1 << 28  # logits, times the positions that add up to each: a few seconds
LOGGED = ("loss_bits", "learning_rate", "optimizer_position", "fingerprint")


@dataclass(frozen=True)
class Segment:
    """A part of a run: trained from the file ``start``, or from the config, it must give ``end``.

    The first one starts from the config, which must give its ``start``, too, if there is one.
    ``logged`` are the lines of metrics.jsonl about it, by their steps.
    """

    first: int
    last: int
    start: Path | None
    end: Path
    config: Config
    logged: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return self.last - self.first

    @property
    def origin(self) -> str:
        """What it starts from, for a sentence."""
        return (
            f"follows from {self.start.name}" if self.start and self.first else "its config gives"
        )


@dataclass(frozen=True)
class Outcome:
    """What a segment gave: each thing that differs; ``path`` is the file in which it does.

    ``fingerprint`` is that of the weights now; ``log`` says where metrics.jsonl and the steps part,
    or where something differs that they agree; ``is_asked``: the stream ``inference`` stands
    elsewhere.
    """

    path: Path
    found: tuple[str, ...] = ()
    fingerprint: str = ""
    log: str = ""
    is_asked: bool = False

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.found


class Verification:
    """The segments of MODEL: of a run folder those between its checkpoints, of a file one.

    ``texts`` are paths of the text that it was trained on; without them it is the embedded one or
    the one that a config.toml beside the file names. ``run`` is a run of it once that was read.
    Raises MinigenError where the last file is damaged, and where that config.toml disagrees with
    the one in it about a key that decides the weights.
    """

    def __init__(self, model_path: str | Path, texts: Sequence[str | Path] = ()):
        self.path = checkpoint.locate(model_path)
        self.saved = checkpoint.load(self.path)
        checkpoint.require_trainable(self.path, self.saved.format)
        config = Config.from_dict(self.saved.config, source=str(self.path))
        _check_config_beside(self.path, config)
        doubt(self.path, self.saved)
        text = tuple(map(str, texts)) or located(config, self.path).corpus.text
        if text == "external":
            raise MinigenError(
                f"{self.path} was trained on {lost_text(self.path.parent)}: give that text with "
                "--text"
            )
        kept = kept_text(text, temporary_folder(self))
        self._config = config.override({"corpus.text": kept})
        files = checkpoint.by_step(Path(model_path)) if Path(model_path).is_dir() else {}
        self.segments = _cut(files or {self.saved.step: self.path}, self._config)
        self.run: Run | None = None

    def read(self, progress: Progress | None = None) -> None:
        """Read the text for all segments; raises MinigenError where it is another one."""
        run = Run(self._config, progress=progress)
        if not self.saved.has_text(run.corpus_sha256):
            raise MinigenError(
                f"the text is not the one that {self.path} was trained on: its SHA-256 is "
                f"{run.corpus_sha256}, the checkpoint's {self.saved.corpus_sha256}; "
                "give the same text with --text"
            )
        self.run = run

    def draw(self, count: int, seed: int) -> None:
        """Keep ``count`` of the segments, drawn from the stream ``verify``; at most all."""
        if count < 1:
            raise OptionError(f"segments must be at least 1 (got {count})")
        left, stream = list(self.segments), Stream(seed, "verify")
        drawn = [left.pop(int(stream.integers(1, len(left))[0])) for _ in left[:count]]
        self.segments = sorted(drawn, key=lambda segment: segment.last)

    @property
    def steps(self) -> int:
        """How many steps the segments take."""
        return sum(segment.steps for segment in self.segments)

    @property
    def share(self) -> float:
        """The share of the run's steps that the segments are."""
        return self.steps / self.saved.step if self.saved.step else 1.0

    def is_worth_processes(self) -> bool:
        """Whether processes side by side save more time than they take to start."""
        config = self.segments[0].config
        logits = self.steps * config.training.batch_size * config.tokenizer.vocab_size
        return len(self.segments) > 1 and logits * config.model.context_length > WORTH_PROCESSES


def _cut(files: dict[int, Path], config: Config) -> list[Segment]:
    steps = sorted(files)
    if steps == [0] or steps[0] > 0:
        steps = [0, *steps]
    logged = {}
    with suppress(MinigenError):  # only an aid: the checkpoints are verified without it
        lines = read_lines(files[steps[-1]].with_name(METRICS))
        logged = {line["step"]: line for line in lines}
    segments = []
    for first, last in pairwise(steps):
        start = files.get(first) if last > first else None
        between = {step: line for step, line in logged.items() if first < step <= last}
        segments.append(Segment(first, last, start, files[last], config, between))
    return segments


def _check_config_beside(path: Path, config: Config) -> None:
    """Refuse a config of the run folder that is not that of the checkpoint in it."""
    if not (path.parent / CONFIG).is_file():
        return
    found = [
        f"{key} is {there!r} in it and {here!r} in {path.name}"
        for key, here, there in deciding_differences(config, Config.of_run(path.parent))
    ]
    if found:
        raise MinigenError(
            f"{path.parent / CONFIG} disagrees with the checkpoint: {'; '.join(found)}; to verify "
            "the checkpoint alone, copy it elsewhere"
        )


def doubt(path: Path, saved: checkpoint.Checkpoint) -> None:
    """Warn where the logs of a run folder are not those that a checkpoint in it vouches for."""
    if not (path.parent / CONFIG).is_file():
        return
    try:
        found = fault(path, saved.logs)
    except MinigenError as error:
        found = str(error)
    if found:
        warnings.warn(f"{path.parent}: {found}", stacklevel=2)


def check(
    segment: Segment,
    fresh: Run | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
) -> Outcome:
    """Train a segment again and compare; ``fresh``, if given, is a run of its config at step 0.

    That run is used up by the first segment, and lends the others its text.
    """
    path = segment.start or segment.end
    try:
        if segment.first == 0:
            run = fresh or Run(segment.config)
            if segment.start:
                found = _differences(segment, path, _load(path), run)
                if found:
                    return Outcome(path, tuple(found), run.fingerprint)
        else:
            run = Run.load(path, config=segment.config)
            if fresh and run.tokenizer.merges == fresh.tokenizer.merges:
                run.corpus = fresh.corpus
        records, log = run.steps(segment.steps), ""
        path = segment.end
        saved = _load(path)
        for record in records:
            log = log or _parting(record, segment.logged.get(record.step, {}))
            if on_step:
                on_step(record)
        found = _differences(segment, path, saved, run)
    except MinigenError as error:
        return Outcome(path, (str(error),))
    if found and not log:
        log = f"no {METRICS} is beside the file, which could tell the step"
        if steps := len(segment.logged):
            log = f"{METRICS} agrees at all {steps} steps: the file was changed after training"
    is_asked = saved.streams["inference"] != run.streams["inference"].position
    return Outcome(path, tuple(found), run.fingerprint, log, is_asked)


def _differences(segment: Segment, path: Path, saved: checkpoint.Checkpoint, run: Run) -> list[str]:
    config = Config.from_dict(saved.config, source=str(path))
    return [
        *(
            f"config: {key} is {there!r} in it and {here!r} in the last checkpoint"
            for key, here, there in deciding_differences(segment.config, config)
        ),
        *compare(saved, snapshot(run)),
    ]


def _parting(record: StepRecord, old: dict[str, Any]) -> str:
    new = record.metrics()
    keys = [key for key in LOGGED if key in old and key in new and old[key] != new[key]]
    values = ", ".join(f"{key} {old[key]}, trained again {new[key]}" for key in keys)
    return f"{METRICS} differs first at step {record.step}: {values}" if keys else ""


def _load(path: Path) -> checkpoint.Checkpoint:
    saved = checkpoint.load(path)
    checkpoint.require_trainable(path, saved.format)
    return saved


def snapshot(run: Run) -> checkpoint.Checkpoint:
    """Return the checkpoint that a run would write now."""
    with tempfile.TemporaryDirectory(prefix="minigen-") as folder:
        path = Path(folder) / "now.safetensors"
        run.save(path)
        return checkpoint.load(path)


@checked
def verify(
    model: str | Path, texts: Sequence[str | Path] = (), *, progress: Progress | None = None
) -> list[str]:
    """Train MODEL again from the config inside it; return a line for each thing that differs.

    Of a run folder every checkpoint is checked, one after the other. What it takes and raises is
    that of ``Verification`` and its ``read``.
    """
    verification = Verification(model, texts)
    verification.read(progress)
    outcomes = [check(segment, verification.run) for segment in verification.segments]
    several = len(outcomes) > 1
    return [
        f"{outcome.path.name}: {line}" if several else line
        for outcome in outcomes
        for line in outcome.found
    ]


def compare(saved: checkpoint.Checkpoint, again: checkpoint.Checkpoint) -> list[str]:
    """Return a line for each thing in which two checkpoints differ; none if they are the same.

    Weights come first, then moments, merges and streams. The position of ``inference`` is left out:
    it says how much text was asked for, which changes nothing else.
    """
    names = [*checkpoint.PARAMETERS, *sorted(again.tensors.keys() - set(checkpoint.PARAMETERS))]
    found = [_compare(name, saved.tensors.get(name), again.tensors[name]) for name in names]
    only = sorted(saved.tensors.keys() - again.tensors.keys())
    found += [f"tensor {name}: not there" for name in only]
    if saved.tokenizer != again.tokenizer:
        found.append("tokenizer: other merges than the text gives")
    texts = saved.corpus_sha256, again.corpus_sha256
    if not (saved.has_text(texts[1]) or again.has_text(texts[0])):
        found.append(f"text of SHA-256 {texts[0]}, trained again with {texts[1]}")
    positions = saved.streams["optimizer"], again.streams["optimizer"]
    if positions[0] != positions[1]:
        found.append(f"stream optimizer at word {positions[0]}, trained again {positions[1]}")
    return [line for line in found if line]


def _compare(name: str, saved: Any, again: Any) -> str:
    if saved is None or saved.shape != again.shape:
        shape = None if saved is None else saved.shape
        return f"tensor {name}: shape {shape}, trained again {again.shape}"
    if saved.tobytes() == again.tobytes():
        return ""
    differs = saved != again
    largest = float(np.abs(saved - again).max())
    where = ", ".join(map(str, np.argwhere(differs)[0])) if differs.any() else "the sign of a zero"
    return (
        f"tensor {name}: {np.count_nonzero(differs)} of {saved.size} numbers differ, the first at "
        f"({where}), by {largest:g} at most"
    )
