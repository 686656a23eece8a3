"""The laboratory: a config cut down to a few steps, its text read once, and runs to compare."""

import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from minigen.exact.streams import Stream
from minigen.files import explained
from minigen.text.documents import Progress, find, passes
from minigen.training import checkpoint
from minigen.training.config import Config
from minigen.training.run import Run, StepRecord

FEWEST_STEPS, MOST_STEPS = 4, 40  # that an experiment trains
TOKENS = 8  # of each text that an experiment asks for
_EVALUATED = 512  # predictions


@dataclass(frozen=True)
class Control:
    """The same comparison on a set-up that is known to break the claim, which must be caught."""

    description: str
    caught: bool


@dataclass(frozen=True)
class Claim:
    """What an experiment showed; ``holds`` is None where it could not be tested here."""

    name: str
    holds: bool | None
    evidence: str
    control: Control


def claim(
    name: str,
    same: str,
    differences: Mapping[str, str],
    control: str,
    caught: str | bool,
    *,
    untested: str = "",
) -> Claim:
    """Make the claim that no comparison found a difference: comparison → what differs, or "".

    ``caught`` says whether, or how, the control was; ``untested`` why nothing could be shown here.
    """
    found = "; ".join(f"{what}: {text}" for what, text in differences.items() if text)
    if found:
        return Claim(name, False, found, Control(control, bool(caught)))
    if untested:
        return Claim(name, None, f"not tested here: {untested}", Control(control, bool(caught)))
    if isinstance(caught, str) and caught:
        control = f"{control}: {caught}"
    return Claim(name, True, same, Control(control, bool(caught)))


class Step(NamedTuple):
    """What one step of a run was: compared bit by bit."""

    positions: int
    batches: bytes
    losses: str
    weights: str
    texts: list[int] | None

    @classmethod
    def of(cls, run: Run, record: StepRecord) -> "Step":
        """Return what a step was, from its record and the run that has just taken it."""
        stream = run.streams["optimizer"]
        assert isinstance(stream, Observed)
        text = record.sample.token_ids if record.sample else None
        return cls(stream.position, stream.batches, record.loss.hex(), run.fingerprint, text)


def difference(
    a: Sequence[Step],
    b: Sequence[Step],
    fields: Sequence[str] = ("positions", "batches", "losses", "weights"),
    first_step: int = 1,
) -> str:
    """Say what differs first, at which step; an empty text where nothing does."""
    for step, (one, other) in enumerate(zip(a, b, strict=True), start=first_step):
        differing = [name for name in fields if getattr(one, name) != getattr(other, name)]
        if differing:
            return f"other {', '.join(differing)} from step {step} on"
    return ""


class Observed(Stream):
    """A stream that keeps what batches were drawn from it."""

    batches = b""

    def integers(self, n: int, below: int) -> Any:
        """Draw as any stream does."""
        drawn = super().integers(n, below)
        self.batches = drawn.tobytes()
        return drawn


class Laboratory:
    """Runs of one config and text that all start from the same weights.

    Between ``FEWEST_STEPS`` and ``MOST_STEPS`` steps, as near to the config's as may be, with the
    warm-up in proportion; without evaluation and samples, unless an experiment asks for them.
    """

    original: "Laboratory | None" = None  # of one that was changed, whose folder it shares

    def __init__(self, config: Config, progress: Progress | None = None):
        whole = config.training.steps
        steps = min(max(whole, FEWEST_STEPS), MOST_STEPS)
        warm_up = -(-config.optimizer.warmup_steps * steps // max(whole, steps))  # rounded up
        self.folder = temporary_folder(self)
        self.config = config.override(
            {
                "corpus.text": kept_text(config.corpus.text, self.folder),
                "training.steps": steps,
                "optimizer.warmup_steps": warm_up,
                "evaluation.every": 0,
                "sampling.every": 0,
                "sampling.max_new_tokens": TOKENS,
            }
        )
        run = Run(self.config, progress=progress)
        corpus = run.read_corpus()
        measured = corpus.validation if len(corpus.validation) else corpus.training
        self.corpus = replace(corpus, validation=measured.part(0, _EVALUATED + 1))
        self.start = self.folder / "start.safetensors"
        run.save(self.start)

    @property
    def steps(self) -> int:
        """How many steps an experiment trains."""
        return self.config.training.steps

    def changed(self, changes: Mapping[str, object]) -> "Laboratory":
        """Return one for another config, which may not change the weights at the start."""
        other = copy(self)
        other.original = self
        other.config = self.config.override(changes)
        other.start = self.folder / "changed.safetensors"
        start = checkpoint.load(self.start)
        checkpoint.save(other.start, replace(start, config=other.config.portable()))
        return other

    def run(
        self,
        changes: Mapping[str, object] | None = None,
        *,
        path: Path | None = None,
        kind: type[Run] = Run,
    ) -> Run:
        """Take up a checkpoint, by default that of the start, with some keys changed."""
        config = self.config.override(changes or {})
        run = kind.load(path or self.start, config=config)
        run.corpus = self.corpus
        position = run.streams["optimizer"].position
        run.streams["optimizer"] = Observed(config.run.seed, "optimizer", position)
        return run

    def train(
        self,
        run: Run,
        steps: int | None = None,
        after_each: Callable[[Run], object] | None = None,
    ) -> list[Step]:
        """Train, by default to the end, and do something after each step; return what happened."""
        trace = []
        for record in run.steps(steps):
            trace.append(Step.of(run, record))
            if after_each:
                after_each(run)
        return trace

    def expected(self) -> tuple[str, list[str]]:
        """Train to the end in this process; return fingerprint and losses."""
        trace = self.train(self.run())
        return trace[-1].weights, [step.losses for step in trace]

    def blindness(self) -> str:
        """Say so where no order of sums can show, since other batches give the same weights."""
        run = self.run()
        run.streams["optimizer"].position += 1 << 32
        is_blind = self.train(run)[-1].weights == self.expected()[0]
        return "other batches give the same weights, too" if is_blind else ""

    def config_file(self) -> Path:
        """Write the config for another process to read; return where it is."""
        path = self.folder / "elsewhere.toml"
        path.write_text(self.config.to_toml(), encoding="utf-8")
        return path

    def stored(self, run: Run) -> bytes:
        """Return the bytes of a run's checkpoint."""
        path = self.folder / "stored.safetensors"
        run.save(path)
        return path.read_bytes()


def temporary_folder(owner: object) -> Path:
    """Make a folder that goes when its owner does, or at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="minigen-")
    weakref.finalize(owner, folder.cleanup)
    return Path(folder.name)


def kept_text(text: str | Sequence[str], folder: Path) -> str | list[str]:
    """Return the text of a config, with what can be read only once (a pipe) kept in files."""
    if isinstance(text, str):
        return text
    kept = list(text)
    for number, path in enumerate(text):
        if passes(path):
            kept[number] = str(folder / f"text-{number}")
            (source,) = find(path)
            with explained(f"cannot keep {path}"), open(kept[number], "wb") as file:
                file.writelines(source.blocks())
    return kept


def state(run: Run) -> bytes:
    """Return all that training changes: weights and moments."""
    return b"".join(flat.tobytes() for flat in (run.model.flat, *run.optimizer.moments.values()))
