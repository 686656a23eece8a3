"""``train`` trains a config in a run folder: metrics, samples, checkpoints."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

import minigen
from minigen.cli import cli
from minigen.cli.options import config_options, out_option, overrides, report_option
from minigen.cli.progress import bar, clock, note, progress_option, reading_progress
from minigen.errors import MinigenError, OptionError
from minigen.signals import heard_by, let_pass

if TYPE_CHECKING:
    from minigen.training.run import StepRecord
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
            print(f"Error: worker {workers.rank} of {workers.size}: {told}", file=stderr)
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


def show_record(record: "StepRecord") -> None:
    """Say what a step measured or wrote, if it did."""
    if record.validation_loss is not None:
        note(f"step {record.step}: validation loss {record.validation_loss:.4f} nats per token")
    if record.sample is not None:
        line = record.sample_line()
        note(f"step {record.step}: {line['prompt']}{line['text']}")
        if record.sample.explanation:
            note(f"step {record.step}: the sample ended early: {record.sample.explanation}")


def follow(
    records: Iterator["StepRecord"],
    run: "minigen.Run",
    progress: bool | None,
    show: Callable[["StepRecord"], None] = lambda record: None,
    *,
    name: str = "training",
) -> bool:
    """Train to the end with a progress bar; return False where the user interrupted."""
    batch_size, total = run.config.training.batch_size, run.config.training.steps
    start, first = time.perf_counter(), run.step
    begins = f"{name}: steps {first + 1} to {total}"
    with (
        deferred_interrupts(run.workers),
        bar(progress, begins, total=total, initial=first, desc=name, unit="step") as shown,
    ):
        for record in records:
            shown.update()
            rate = (record.step - first) * batch_size / (time.perf_counter() - start)
            shown.set_postfix_str(f"loss {record.loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
            show(record)
            if run.workers.is_stopping():
                return False
    return True


def _train(folder: "minigen.RunFolder", progress: bool | None) -> bool:
    run = folder.run
    if (V := run.tokenizer.vocab_size) < run.config.tokenizer.vocab_size:
        note(f"the text has pairs for {V} tokens, fewer than tokenizer.vocab_size allows")
    training, warmup = run.config.training, run.config.optimizer.warmup_steps
    if warmup > training.steps:
        note(
            f"optimizer.warmup_steps = {warmup} is more than the {training.steps} steps: the "
            "learning rate never comes to its peak"
        )
    if run.config.evaluation.every and not len(run.read_corpus().validation):
        note("no text is left for validation, so no validation loss is measured")
    return follow(folder.steps(), run, progress, show_record)


@cli.command()
@config_options
@out_option("runs/<config>")
@click.option("--resume", is_flag=True, help="Go on with the run in the folder.")
@report_option
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

    from minigen.training.config import CONFIG, lost_text
    from minigen.training.folder import require_empty

    def load() -> minigen.Config:
        if resume and config is not None:
            raise OptionError(
                f"--resume takes the config from --out's folder, so CONFIG must go (got {config!r})"
            )
        changes = overrides(settings, texts)
        if not resume:
            loaded = minigen.Config.load(config or "fables", changes)
            require_empty(path)
            return loaded
        if not (path / CONFIG).is_file():
            is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
            cure = "train without --resume" if is_free else f"it has no {CONFIG}"
            raise MinigenError(f"{path} holds no run to resume: {cure}")
        loaded = minigen.Config.of_run(path, changes)
        if loaded.corpus.text == "external":
            cure = "give the same text with --text"
            raise MinigenError(f"the run in {path} was trained on {lost_text(path)}: {cure}")
        return loaded

    with one_voice() as workers:
        with reading_progress(progress) as reading:
            loaded = workers.from_first(load)
            if resume:
                folder = minigen.RunFolder.resume(path, loaded, progress=reading, workers=workers)
            else:
                run = minigen.Run(loaded, progress=reading, workers=workers)
                with deferred_interrupts(workers):  # from here on there is something to go on with
                    folder = minigen.RunFolder.create(path, run)
        run = folder.run
        if run.step == run.config.training.steps:
            note(f"nothing left to do: all {run.step} steps are done")
        elif not _train(folder, progress):
            return interrupted(folder)
        if report:
            workers.from_first(lambda: write_page(path))
        click.echo(f"trained {run.step} steps: {folder.latest}")
        click.echo(f"fingerprint {run.fingerprint}")
    return 0


def write_page(run: str | Path, out: str | None = None) -> None:
    """Write the report of a run and say where."""
    from minigen.report.page import write_report

    with clock("making the page"):
        page = write_report(run, out)
    click.echo(f"report {page}")


def interrupted(folder: "minigen.RunFolder") -> int:
    """Save the run, say how to go on, and return the exit status."""
    from minigen.training.config import passing
    from minigen.training.folder import to_go_on

    with heard_by(let_pass):  # some launchers say it twice
        folder.save()
    note(f"interrupted at step {folder.run.step}, saved {folder.latest}")
    text = folder.run.config.corpus.text
    again = [word for path in text for word in ("--text", path)] if passing(text) else []
    note(f"to go on: {to_go_on('train', folder.path, again)}")
    return 130
