"""A run folder: config, metrics and samples line by line, and a checkpoint every so many steps.

What was logged behind the latest checkpoint is cut off before a run goes on from it, so that a
run killed at any moment ends with the same bytes as one that was never stopped.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from minigen import files
from minigen.errors import MinigenError
from minigen.training import checkpoint
from minigen.training.config import CONFIG as CONFIG
from minigen.training.config import Config
from minigen.training.run import Run, StepRecord
from minigen.training.workers import join

METRICS, SAMPLES, TIMING = "metrics.jsonl", "samples.jsonl", "timing.jsonl"
_LOGS = (METRICS, SAMPLES, TIMING)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log; one that was cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise MinigenError(f"{path} is damaged: {error}; resuming the run mends it") from None


def _cut(path: Path, step: int) -> None:
    """Cut a log off behind its last whole line of a step up to ``step``."""
    if not path.exists():
        return
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        end += len(line)
    os.truncate(path, end)


class RunFolder:
    """A folder that a run is written to while it trains, with its ``latest`` checkpoint.

    Of several workers the first one alone reads and writes it, so that only it need see the disk.
    """

    def __init__(self, path: str | Path, run: Run):
        self.path, self.run = Path(path), run
        self.latest = self._checkpoint()
        self._owned: files.Ownership | None = None

    @classmethod
    def create(cls, path: str | Path, run: Run) -> Self:
        """Start a folder, new or empty, with the config and a checkpoint of step 0."""
        folder = cls(path, run)
        run.workers.from_first(folder._make)
        folder.save()
        return folder

    @classmethod
    def resume(
        cls, path: str | Path, config: Config, *, workers: Any = None, **run_options: Any
    ) -> Self:
        """Go on from the latest checkpoint of a folder, with its config or a permitted change.

        ``run_options`` are those of ``Run``. A folder without a checkpoint starts at step 0.
        """
        workers = join(workers)
        owned: list[files.Ownership | None] = [None]  # of the first worker alone

        def take() -> None:
            owned[0] = files.own(Path(path))

        workers.from_first(take)
        latest = workers.from_first(lambda: _latest(Path(path)))
        if latest is None:
            run = Run(config, workers=workers, **run_options)
        else:
            run = Run.load(latest, config=config, workers=workers, **run_options)
            run.read_corpus()  # refuses another text before anything is cut off
        folder = cls(path, run)
        folder._owned = owned[0]
        workers.from_first(folder._cut_logs)
        if latest is None:
            folder.save()
        return folder

    def _make(self) -> None:
        require_empty(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MinigenError(f"cannot make folder {self.path}: {error.strerror}") from None
        self._owned = files.own(self.path)
        require_empty(self.path)  # another one may have been faster
        self._write_config()

    def _cut_logs(self) -> None:
        for log in _LOGS:
            _cut(self.path / log, self.run.step)
        self._write_config()

    def _write_config(self) -> None:
        checkpoint.write_atomically(self.path / CONFIG, self.run.config.to_toml().encode())

    def _checkpoint(self) -> Path:
        return self.path / f"step-{self.run.step:06d}.safetensors"

    def save(self) -> None:
        """Write the checkpoint of the step that the run has reached."""
        self.run.save(self._checkpoint())
        self.latest = self._checkpoint()

    def _open(self, log: str) -> IO[bytes]:
        # What the other workers log leads nowhere.
        return open(self.path / log if self.run.workers.rank == 0 else os.devnull, "ab")

    def steps(self) -> Iterator[StepRecord]:
        """Train to the end, logging each step and saving every ``checkpoint.every`` steps."""
        every = self.run.config.checkpoint.every
        try:
            with (
                self._open(METRICS) as metrics,
                self._open(SAMPLES) as samples,
                self._open(TIMING) as timing,
            ):
                start = time.perf_counter()
                for record in _blamed(self.run.steps()):
                    seconds = time.perf_counter() - start
                    _append(metrics, record.metrics())
                    _append(timing, {"step": record.step, "seconds": round(seconds, 6)})
                    if record.sample:
                        _append(samples, record.sample.line())
                    is_last = record.step == self.run.config.training.steps
                    if is_last or (every and record.step % every == 0):
                        self.run.workers.from_first(lambda: _sync(metrics, samples))
                        self.save()
                    yield record
                    start = time.perf_counter()
        except OSError as error:
            raise MinigenError(f"cannot write to {self.path}: {error.strerror}") from None
        except MinigenError as error:
            raise MinigenError(f"{error}; the last checkpoint, {self.latest}, is intact") from error


def _blamed(records: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Name what the training itself could not read, which is no fault of the run folder."""
    try:
        yield from records
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise MinigenError(f"{what}{error.strerror or error}") from error


def _latest(path: Path) -> Path | None:
    """Return the checkpoint from which a run may go on, if there is one."""
    if not any(path.glob("step-*.safetensors")):
        return None
    latest = checkpoint.locate(path)
    saved = checkpoint.load(latest, moments=False)
    checkpoint.require_trainable(latest, saved.format)
    if f"step-{saved.step:06d}.safetensors" != latest.name:
        raise MinigenError(
            f"{latest} is of step {saved.step}, whatever its name says: remove it, or name it so"
        )
    return latest


def _sync(*logs: IO[bytes]) -> None:
    """Bring logs to the disk before the checkpoint that relies on them."""
    for log in logs:
        os.fsync(log.fileno())


def _append(log: IO[bytes], line: dict[str, Any]) -> None:
    log.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    log.flush()


def require_empty(path: Path) -> None:
    """Raise MinigenError unless the folder is new or empty."""
    try:
        is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise MinigenError(f"cannot read folder {path}: {error.strerror}") from None
    if is_taken:
        raise MinigenError(
            f"{path} is not a new or empty folder: name another with --out, "
            "or go on with minigen train --resume"
        )
