"""``sweep`` trains one config with many values and seeds; a table compares the final losses."""

import platform
from collections.abc import Mapping
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

import minigen
from minigen import files
from minigen.cli import cli
from minigen.cli.options import config_options, out_option, overrides
from minigen.cli.progress import bar, note, notes_of_libraries, progress_option
from minigen.cli.training import deferred_interrupts, one_voice
from minigen.errors import MinigenError, OptionError

if TYPE_CHECKING:
    from minigen.training.workers import Workers

_GLANCE = 0.5  # seconds between two looks at how far the runs have come


@cli.command()
@config_options
@click.option(
    "--seeds", metavar="START:STOP", help="Seeds, as 0:5 for 0 to 4.  [default: CONFIG's]"
)
@out_option("runs/<config>-sweep")
@click.option("--resume", is_flag=True, help="Go on with the sweep in the folder.")
@progress_option
def sweep(
    config: str | None,
    texts: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: str | None,
    out: str | None,
    resume: bool,
    progress: bool | None,
) -> int:
    """Train CONFIG with each combination of values, for each seed.

    A table compares the final losses. --set takes values with commas between. Each run gets a
    folder in DIR and is what minigen train makes of its config.

    \b
    Example:
      minigen sweep fables --set optimizer.learning_rate=0.003,0.01 --seeds 0:5 --out runs/rates
    """
    path = Path(out or f"runs/{Path(config or 'fables').stem}-sweep")
    with one_voice() as workers:
        from minigen.training import sweep as sweeping
        from minigen.training.folder import to_go_on

        owned: list[files.Ownership | None] = []  # to the end of the sweep
        given = {"CONFIG": config, "--text": texts, "--set": settings, "--seeds": seeds}

        def load() -> dict[Path, minigen.Config]:
            if resume and (named := [name for name, value in given.items() if value]):
                raise OptionError(
                    f"--resume takes all of it from the folder, so {', '.join(named)} must go"
                )
            if not resume:
                base = minigen.Config.load(config or "fables", overrides((), texts))
                chosen = sweeping.parse_seeds(str(base.run.seed) if seeds is None else seeds)
                planned = sweeping.plan(base, sweeping.parse_axes(settings), chosen)
                owned.append(sweeping.create(path, planned))
            else:
                owned.append(files.own(path) if path.is_dir() else None)
            found = sweeping.find(path)
            for folder, one in found.items():
                if fault := sweeping.mend(folder, one):
                    note(f"{folder.name}: {fault}: it is trained again")
            return found

        runs = workers.from_first(load)
        todo = {folder: one for folder, one in runs.items() if not sweeping.is_done(folder, one)}
        if not todo:
            note(f"nothing left to do: all {len(runs)} runs are done")
        try:
            failures = _train_all(todo, workers, progress) if todo else {}
        except KeyboardInterrupt:
            note(f"interrupted; to go on: {to_go_on('sweep', path)}")
            return 130
        except BrokenProcessPool:
            raise MinigenError(
                "a process of the sweep was killed, for want of memory most often; to go on: "
                f"{to_go_on('sweep', path)}"
            ) from None
        for folder, failure in failures.items():
            note(f"Error: {folder.name}: {failure}")
        if workers.rank == 0:  # the one that handed out the runs, and sees the folder
            _print(sweeping.table(runs))
    return 1 if failures else 0


def _train_all(
    todo: "Mapping[Path, minigen.Config]", workers: "Workers", progress: bool | None
) -> dict[Path, MinigenError]:
    """Train each run, showing how far all of them have come; return what went wrong with which."""
    from minigen.training.pool import pool
    from minigen.training.sweep import last_metrics

    failures: dict[Path, MinigenError] = {}
    steps = sum(config.training.steps for config in todo.values())
    with (
        pool(workers, len(todo), within=notes_of_libraries) as executor,
        bar(progress, "", total=steps, unit="step") as shown,
    ):
        futures = {executor.submit(_train, folder): folder for folder in todo} if executor else {}
        running, waiting = set(futures), list(futures)
        try:
            while running:
                done, running = wait(running, timeout=_GLANCE)
                for future in done:
                    try:
                        future.result()  # raises KeyboardInterrupt after a signal to it alone
                    except MinigenError as error:
                        failures[futures[future]] = error
                if shown.disable:
                    for future in [one for one in waiting if one.running() or one.done()]:
                        waiting.remove(future)
                        note(f"training {futures[future].name}")
                    continue
                come = sum(last_metrics(folder).get("step", 0) for folder in todo)
                shown.set_postfix_str(f"{len(futures) - len(running)} of {len(futures)} runs")
                shown.update(come - shown.n)
        except KeyboardInterrupt:
            for future in running:
                future.cancel()
            raise
    return failures


@cache
def _process() -> "Workers":
    """Return this process of the pool: once it was asked to stop, it takes up no other run."""
    from minigen.training.workers import Workers

    return Workers()


def _train(folder: Path) -> None:
    """Train the run of a sub-folder to its end, in a process of the pool."""
    if not folder.is_dir():
        raise MinigenError(
            f"{platform.node()} does not see it: --out must be on a disk that all workers share"
        )
    process = _process()
    with deferred_interrupts(process):
        if process.is_stopping():
            raise KeyboardInterrupt
        run = minigen.RunFolder.resume(folder, minigen.Config.of_run(folder), workers=process)
        for _ in run.steps():
            if process.is_stopping():
                run.save()
                raise KeyboardInterrupt


def _print(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
