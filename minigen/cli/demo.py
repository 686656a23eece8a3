"""``demo`` shows in a minute what minigen is about."""

import shlex
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path

import click

import minigen
from minigen.cli import cli, training
from minigen.cli.options import out_option, overrides, report_option, set_option
from minigen.cli.progress import note, progress_option
from minigen.errors import OptionError


def _free_folder() -> Path:
    """Return runs/demo, or the first of runs/demo-2, runs/demo-3, … that is not taken."""
    names = chain(["runs/demo"], (f"runs/demo-{number}" for number in count(2)))
    return next(path for path in map(Path, names) if not path.exists())


@cli.command()
@out_option("runs/demo")
@report_option
@set_option
@progress_option
def demo(out: str | None, report: bool, settings: tuple[str, ...], progress: bool | None) -> int:
    """Train twice, with samples on the way and without, and compare.

    Batches, losses and weights must be the same, bit for bit.

    \b
    Example:
      minigen demo --out runs/demo
    """
    with training.one_voice() as workers:
        if workers.size > 1:
            raise OptionError("demo is for one process (train and sweep are for mpiexec, too)")
    changes = overrides(settings)
    path = Path(out) if out else _free_folder()

    from minigen.proof.demonstration import Demonstration
    from minigen.training.folder import require_empty

    config = minigen.Config.load("fables", changes)
    require_empty(path)
    steps, every = config.training.steps, config.sampling.every
    if not 1 <= every <= steps:
        note(
            f"no text will be asked for on the way, so this shows nothing: sampling.every must be "
            f"from 1 to the {steps} steps (it is {every})"
        )
    demonstration = Demonstration(config)
    run, twin = demonstration.run, demonstration.twin
    with training.deferred_interrupts(run.workers):
        folder = minigen.RunFolder.create(path, run)
    click.echo(f"Training {run.model.flat.size:,} weights for {steps} steps, with samples.")
    if not training.follow(
        demonstration.watch(run, folder.steps()), run, progress, training.show_record
    ):
        return training.interrupted(folder)
    click.echo("Training its twin, which is never asked for text.")
    if not training.follow(demonstration.watch(twin, twin.steps()), twin, progress, name="twin"):
        return training.interrupted(folder)
    findings = demonstration.findings()
    for finding in findings:
        click.echo(finding.text)
    click.echo("\nText from the trained model:\n")
    prompt = config.sampling.prompt
    policy = asdict(config.sampling.policy) | {"min_new_tokens": 60}  # more than a line
    click.echo(prompt + run.generate(prompt, **policy))
    if report:
        training.write_page(path)
    how = ["--temperature", str(config.sampling.temperature)]
    command = shlex.join(["minigen", "generate", str(path), prompt, *how])
    click.echo(f"\nEverything is in {path}; go on with: {command}")
    return 0 if all(finding.holds for finding in findings) else 1
