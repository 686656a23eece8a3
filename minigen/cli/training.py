"""`train` trains a config in a run folder; `demo` shows in a minute what minigen is about."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from minigen.cli import cli
from minigen.cli.options import (
    PATH,
    config_argument,
    note,
    overrides,
    progress_option,
    set_option,
    shows_progress,
    text_option,
)
from minigen.errors import MinigenError, OptionError
from minigen.signals import heard_by, let_pass

if TYPE_CHECKING:
    from minigen.training.folder import RunFolder
    from minigen.training.run import Run, StepRecord
    from minigen.training.workers import Workers


@contextmanager
def one_voice() -> Iterator["Workers"]:
    """Join the workers that mpiexec started, if any; the first of them speaks for all.

    A worker that fails alone speaks for itself, and ends those that wait for it.
    """
    from minigen.training.workers import from_mpiexec

    workers = from_mpiexec()
    stderr = sys.stderr
    if workers.rank > 0:  # for good: what is said at the exit is the first one's to say, too
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        yield workers
    except BaseException as error:
        if not workers.fail_together():
            told = str(error) or type(error).__name__
            print(
                f"Error: worker {workers.rank} of {workers.size}: {told}", file=stderr, flush=True
            )
            workers.abort(1)
        raise


@contextmanager
def deferred_interrupts(workers: "Workers") -> Iterator[None]:
    """Let a signal to stop wait for the end of a step; a second Ctrl-C does not wait."""

    def defer(number: int, _frame: FrameType | None) -> None:
        if workers.asked_to_stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        workers.asked_to_stop = True

    with heard_by(defer):
        yield


@contextmanager
def reading_progress(progress: bool | None) -> Iterator[Any]:
    """Give ``corpus.load`` a bar to report the bytes it has read to."""
    from tqdm import tqdm

    with tqdm(
        desc="reading", unit="B", unit_scale=True, leave=False, disable=not shows_progress(progress)
    ) as bar:

        def report(what: str, done: int, total: int) -> None:
            bar.set_description_str(what, refresh=False)
            bar.total = total
            bar.update(done - bar.n)

        yield report


def _show(record: "StepRecord") -> None:
    if record.validation_loss is not None:
        note(f"step {record.step}: validation loss {record.validation_loss:.4f} nats per token")
    if record.sample is not None:
        note(f"step {record.step}: {record.sample.prompt}{record.sample.text}")


def follow(
    records: Iterator["StepRecord"],
    run: "Run",
    progress: bool | None,
    show: Callable[["StepRecord"], None],
) -> bool:
    """Train to the end with a progress bar; return False where the user interrupted."""
    from tqdm import tqdm

    batch_size = run.config.training.batch_size
    start, first = time.perf_counter(), run.step
    with (
        deferred_interrupts(run.workers),
        tqdm(
            total=run.config.training.steps,
            initial=first,
            unit="step",
            disable=not shows_progress(progress),
        ) as bar,
    ):
        for record in records:
            bar.update()
            rate = (record.step - first) * batch_size / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {record.loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
            show(record)
            if run.workers.is_stopping():
                return False
    return True


def _train(folder: "RunFolder", progress: bool | None) -> bool:
    run = folder.run
    if (V := run.tokenizer.vocab_size) < run.config.tokenizer.vocab_size:
        note(f"the text has pairs for {V} tokens, fewer than tokenizer.vocab_size allows")
    if run.config.evaluation.every and not len(run.read_corpus().validation):
        note("no text is left for validation, so no validation loss is measured")
    return follow(folder.steps(), run, progress, _show)


@cli.command()
@config_argument
@text_option
@set_option
@click.option(
    "--out", type=PATH, metavar="DIR", help="Run folder, new or empty.  [default: runs/<config>]"
)
@click.option("--resume", is_flag=True, help="Go on with the run in the folder.")
@click.option("--report", is_flag=True, help="Write report.html into the folder at the end.")
@progress_option
def train(
    config: str | None,
    texts: tuple[str, ...],
    settings: tuple[str, ...],
    out: str | None,
    resume: bool,
    report: bool,
    progress: bool | None,
) -> int:
    """Train CONFIG into a run folder: metrics, samples, checkpoints.

    CONFIG is a TOML file or one of fables (the default), bigram and names.

    \b
    Example:
      minigen train fables --text book.txt --set training.steps=500 --out runs/book
    """
    path = Path(out or f"runs/{Path(config or 'fables').stem}")

    from minigen.training.config import Config
    from minigen.training.folder import CONFIG, RunFolder, require_empty
    from minigen.training.run import Run

    def load() -> Config:
        if resume and config is not None:
            raise OptionError(
                f"--resume takes the config from the folder, so CONFIG must go (got {config!r})"
            )
        if report:
            _require_report()
        changes = overrides(settings, texts)
        if not resume:
            require_empty(path)
            return Config.load(config or "fables", changes)
        if not (path / CONFIG).is_file():
            raise MinigenError(f"{path} holds no run to resume: train without --resume")
        loaded = Config.load(path / CONFIG, changes)
        if "-" in loaded.corpus.text and "corpus.text" not in changes:
            raise MinigenError(
                f"the run in {path} was trained on standard input: give the same text with --text"
            )
        return loaded

    with one_voice() as workers:
        with reading_progress(progress) as reading:
            loaded = workers.from_first(load)
            if resume:
                folder = RunFolder.resume(path, loaded, progress=reading, workers=workers)
            else:
                run = Run(loaded, progress=reading, workers=workers)
                with deferred_interrupts(workers):  # from here on there is something to go on with
                    folder = RunFolder.create(path, run)
        run = folder.run
        if run.step == run.config.training.steps:
            note(f"nothing left to do: all {run.step} steps are done")
        elif not _train(folder, progress):
            return _interrupted(folder)
        if report:
            workers.from_first(lambda: _write_report(path))
        click.echo(f"trained {run.step} steps: {folder.latest}")
        click.echo(f"fingerprint {run.fingerprint}")
    return 0


def _require_report() -> None:
    """Refuse --report before training where what it needs is not installed."""
    from minigen.report import require

    require()


def _write_report(path: Path) -> None:
    from minigen.report import write_report

    click.echo(f"report {write_report(path)}")


def _free_folder() -> Path:
    """Return runs/demo, or the first of runs/demo-2, runs/demo-3, … that is not taken."""
    number = 1
    while (path := Path(f"runs/demo-{number}" if number > 1 else "runs/demo")).exists():
        number += 1
    return path


@cli.command()
@click.option(
    "--out", type=PATH, metavar="DIR", help="Run folder, new or empty.  [default: runs/demo]"
)
@click.option("--report", is_flag=True, help="Write report.html into the folder at the end.")
@set_option
@progress_option
def demo(out: str | None, report: bool, settings: tuple[str, ...], progress: bool | None) -> int:
    """Train twice, with samples on the way and without, and compare.

    Batches, losses and weights must be the same, bit for bit.

    \b
    Example:
      minigen demo --out runs/demo
    """
    with one_voice() as workers:
        if workers.size > 1:
            raise OptionError("demo is for one process (train and sweep are for mpiexec, too)")
    if report:
        _require_report()
    changes = overrides(settings, ())
    path = Path(out) if out else _free_folder()

    from minigen.training.config import Config
    from minigen.training.folder import RunFolder, require_empty
    from minigen.training.run import Run

    require_empty(path)
    config = Config.load("fables", changes)
    run, twin = Run(config), Run(config.override({"sampling.every": 0}))
    with deferred_interrupts(run.workers):
        folder = RunFolder.create(path, run)
    steps = config.training.steps
    records: list[StepRecord] = []
    twin_records: list[StepRecord] = []

    def keep_and_show(record: "StepRecord") -> None:
        records.append(record)
        _show(record)

    click.echo(f"Training {run.model.flat.size:,} weights for {steps} steps, with samples.")
    if not follow(folder.steps(), run, progress, keep_and_show):
        return _interrupted(folder)
    click.echo("Training its twin, which is never asked for text.")
    if not follow(twin.steps(), twin, progress, twin_records.append):
        return _interrupted(folder)

    same = {
        "batches": [r.optimizer_position for r in records]
        == [r.optimizer_position for r in twin_records],
        "losses": [r.loss for r in records] == [r.loss for r in twin_records],
        "weights": run.fingerprint == twin.fingerprint,
    }
    drawn = run.streams["inference"].position
    click.echo(f"Words drawn for samples: {drawn} by the run, 0 by its twin.")
    for what, is_same in same.items():
        click.echo(f"Same {what} at every step: {'yes' if is_same else 'NO'}")
    click.echo(f"Fingerprint: {run.fingerprint}")
    click.echo("\nText from the trained model:\n")
    prompt = config.sampling.prompt
    policy = asdict(config.sampling.policy) | {"min_new_tokens": 60}  # more than a line
    click.echo(prompt + run.generate(prompt, **policy))
    if report:
        _write_report(path)
    command = shlex.join(["minigen", "generate", str(path), prompt])
    click.echo(f"\nEverything is in {path}; go on with: {command}")
    return 0 if all(same.values()) else 1


def _interrupted(folder: "RunFolder") -> int:
    with heard_by(let_pass):  # some launchers say it twice
        folder.save()
    note(f"interrupted at step {folder.run.step}, saved {folder.latest}")
    text = ["--text", "-"] if "-" in folder.run.config.corpus.text else []
    note(f"to go on: {to_go_on('train', folder.path, text)}")
    return 130


def to_go_on(command: str, path: Path, options: Sequence[str] = ()) -> str:
    """Return the command, fit to be pasted, that goes on with what is in a folder."""
    return shlex.join(["minigen", command, "--resume", "--out", str(path), *options])
