"""A run folder: config, metrics and samples line by line, and a checkpoint every so many steps.

What was logged behind the latest checkpoint is cut off before a run goes on from it, so that a
run killed at any moment ends with the same bytes as one that was never stopped. Where the logs are
not what that checkpoint vouches for, the run goes on from the latest whose logs are.
"""

import os
import shlex
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from minigen import files
from minigen.arguments import checked
from minigen.errors import MinigenError
from minigen.training import checkpoint, logs
from minigen.training.checkpoint import Checkpoint
from minigen.training.config import CONFIG, Config
from minigen.training.logs import METRICS, SAMPLES, TIMING, Log
from minigen.training.run import Run, StepRecord, is_due
from minigen.training.workers import join


class _LostError(MinigenError):
    """A folder, or what stands in it, is not what this process made of it."""


class RunFolder:
    """A folder that a run is written to while it trains, with its ``latest`` checkpoint.

    Of several workers the first one alone reads and writes it, so that only it need see the disk.
    Threads take turns; a forked process may not write to it.
    """

    def __init__(self, path: str | Path, run: Run):
        self.path, self.run = Path(path), run
        self._place = self.path.absolute()  # whatever folder the process works in later
        self.latest = self._checkpoint()
        self._owned: Any = None  # kept as long as the folder is to be this process's
        self._logs: dict[str, Log] = {}  # what the other workers log leads nowhere
        self._logged = run.step  # the last step of which all lines are there

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r}, {self.run!r})"

    @classmethod
    @checked
    def create(cls, path: str | Path, run: Run) -> Self:
        """Start a folder, new or empty, with the config and a checkpoint of step 0."""
        folder = cls(path, run)
        run.workers.from_first(folder._make)
        folder.save()
        return folder

    @classmethod
    @checked
    def resume(
        cls, path: str | Path, config: Config, *, workers: Any = None, **run_options: Any
    ) -> Self:
        """Go on from the latest checkpoint of a folder, with its config or a permitted change.

        ``run_options`` are those of ``Run``. A folder without a checkpoint starts at step 0.
        """
        workers, owned = join(workers), []

        def take() -> tuple[Path | None, dict[str, logs.State] | None]:
            owned.append(files.own(Path(path)))
            return _latest(Path(path))

        latest, vouched = workers.from_first(take)
        if latest is None:
            run = Run(config, workers=workers, **run_options)
        else:
            run = Run.load(latest, config=config, workers=workers, **run_options)
            run.read_corpus()  # refuses another text before anything is cut off
        folder = cls(path, run)
        [folder._owned] = owned or [None]
        workers.from_first(lambda: folder._open(vouched))
        if latest is None:
            folder.save()
        return folder

    def _make(self) -> None:
        with files.explained(f"cannot make folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
        self._owned = files.own(self.path)
        require_empty(self.path)
        self._open(None)

    def _open(self, vouched: dict[str, logs.State] | None) -> None:
        """Write the config, and open the logs, cut to what is vouched for or else by steps.

        Whoever of this process wrote to the folder before may do so no more.
        """
        if self._owned:
            self._owned.writer = id(self)
        files.write_atomically(self.path / CONFIG, self.run.config.to_toml().encode())
        files.sync(self.path.parent)  # the folder itself must be there after a power cut
        for name in logs.LOGS:
            path, state = self.path / name, (vouched or {}).get(name)
            with files.explained(f"cannot write to {path}"):
                size = state["bytes"] if state else logs.end_of(path, self.run.step)
                self._logs[name] = Log(path, size)

    def _checkpoint(self) -> Path:
        return self.path / f"step-{self.run.step:06d}.safetensors"

    def save(self) -> None:
        """Write the checkpoint of the step that the run has reached, and what it relies on."""
        with self.run._training:  # another thread may be training it
            place = self._place / self._checkpoint().name
            self.run.save(place, logs=self.run.workers.from_first(self._sync))
            self.latest = self._checkpoint()

    def _require_own(self, step: int) -> None:
        """Refuse to write where somebody else does by now, or behind a step that is not logged."""
        try:
            is_lost = self._owned and files.own(self._place) is not self._owned
        except MinigenError as error:  # it is gone, or in a forked process another one's
            raise _LostError(str(error)) from None
        if is_lost:
            raise _LostError(
                f"{self.path} is another folder now than the one that this run was written to: "
                "nothing more is written to it"
            )
        if self._owned and self._owned.writer != id(self):
            raise _LostError(
                f"{self.path} was opened again in this process: go on with that RunFolder, which "
                "alone writes to it now"
            )
        if self._logs and self._logged != step:
            raise _LostError(
                f"the logs of {self.path} end at step {self._logged}, and the run is at step "
                f"{step}: go on with RunFolder.resume, from the last checkpoint"
            )

    def _sync(self) -> dict[str, logs.State]:
        self._require_own(self.run.step)
        with files.explained(f"cannot write to {self.path}"):
            return {name: self._logs[name].sync() for name in logs.VOUCHED}

    def steps(self) -> Iterator[StepRecord]:
        """Train to the end, logging each step and saving every ``checkpoint.every`` steps."""
        try:
            records = _blamed(self.run.steps())
            while record := self._next(records):
                yield record
        except OSError as error:
            raise MinigenError(f"cannot write to {self.path}: {error.strerror}") from None
        except _LostError:
            raise
        except MinigenError as error:
            raise MinigenError(f"{error}; the last checkpoint, {self.latest}, is intact") from error

    def _next(self, records: Iterator[StepRecord]) -> StepRecord | None:
        """Take the next step, log it, and save it where that is due: whole, for other threads."""
        with self.run._training:
            start = time.perf_counter()
            record = next(records, None)
            if not record:
                return None
            seconds = round(time.perf_counter() - start, 6)
            lines = {
                METRICS: record.metrics(),
                TIMING: {"step": record.step, "seconds": seconds},
                SAMPLES: record.sample_line(),
            }
            self._require_own(record.step - 1)
            for name, log in self._logs.items():
                if line := lines[name]:
                    log.append(line)
            self._logged = record.step
            every, last = self.run.config.checkpoint.every, self.run.config.training.steps
            if record.step == last or is_due(record.step, every):
                self.save()
            return record


def _blamed(records: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Name what the training itself could not read, which is no fault of the run folder."""
    try:
        yield from records
    except OSError as error:
        raise MinigenError(f"{error.filename or 'its text'}: {error.strerror or error}") from error


def examined(path: Path) -> Iterator[tuple[Path, Checkpoint | None, str]]:
    """Yield a folder's checkpoints, newest first: None where damaged, and what is wrong with it.

    That is its damage, or which of the logs is not what it vouches for.
    """
    for _, file in sorted(checkpoint.by_step(path).items(), reverse=True):
        try:
            saved = checkpoint.load(file, moments=False)
        except MinigenError as error:
            yield file, None, str(error)
        else:
            yield file, saved, logs.fault(file, saved.logs)


def _latest(path: Path) -> tuple[Path | None, dict[str, logs.State] | None]:
    """Return the checkpoint from which a run may go on, if there is one.

    With it comes what it vouches for in the logs. Warns where that is not the newest one.
    """
    for name in logs.LOGS:
        logs.require_own(path / name)
    there = examined(path)
    newest, saved, fault = next(there, (None, None, ""))
    if not newest:
        if any((path / name).exists() and (path / name).stat().st_size for name in logs.VOUCHED):
            warnings.warn(
                f"{path} holds logs and no checkpoint: the run is trained again from step 0",
                stacklevel=2,
            )
        return None, None
    # Those of an older format cannot be trained on.
    older = ((file, s, doubt) for file, s, doubt in there if s and s.format == checkpoint.FORMAT)
    if not saved:
        step = next((s.step for _, s, _ in older), 0)
        raise MinigenError(f"{fault}; if it is removed, the run goes on from step {step}")
    checkpoint.require_trainable(newest, saved.format)
    if not fault:
        if odd := logs.strange(path, saved.logs or {}, saved.step):
            warnings.warn(
                f"{odd} holds lines that are not the run's own behind those that {newest.name} "
                "vouches for: they are cut off",
                stacklevel=2,
            )
        return newest, saved.logs
    for file, saved, doubt in older:
        if not doubt:
            warnings.warn(
                f"{path}: {fault}: the run goes on from step {saved.step}, up to which the logs "
                "are whole; the steps after it are trained again, to the same bits",
                stacklevel=2,
            )
            return file, saved.logs
    raise MinigenError(
        f"{path}: {fault}, and no other checkpoint agrees with the logs: put the log back as it "
        "was, or remove the checkpoints to train from step 0 again"
    )


def require_empty(path: Path) -> None:
    """Raise MinigenError unless the folder is new or empty, but for what a kill left unfinished."""
    with files.explained(f"cannot read folder {path}"):
        if not path.exists():
            return
        files.remove_strays(path)
        # Of config.toml, hidden, is what a kill left of it.
        there = [name for name in os.listdir(path) if not name.startswith(f".{CONFIG}.")]
    if there:
        go_on = f", or go on with {to_go_on('train', path)}" if CONFIG in there else ""
        raise MinigenError(f"{path} is not a new or empty folder: name another with --out{go_on}")


def to_go_on(command: str, path: Path, options: Sequence[str] = ()) -> str:
    """Return the command, fit to be pasted, that goes on with what is in a folder."""
    return shlex.join(["minigen", command, "--resume", "--out", str(path), *options])
