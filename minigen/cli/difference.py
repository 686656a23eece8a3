"""``diff`` says in what two runs differ first."""

from dataclasses import asdict

import click

from minigen.cli import cli
from minigen.cli.options import PATH, json_option, print_json
from minigen.cli.progress import clock, note


@cli.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@json_option
def diff(a: str, b: str, as_json: bool) -> int:
    """Say in what A and B differ first, and what to do about it.

    Both are run folders or checkpoints. What is looked at, from the outside in: the config's keys
    that decide the weights, text, merges, initial weights, and the first step on which logs or
    checkpoints part. From a checkpoint of both that lies before it, that step is trained again, to
    name the part that differs and the side that is wrong. Exit status 0 the same, 1 different.

    \b
    Example:
      minigen diff runs/here runs/there
    """
    from minigen.proof.difference import compare

    with clock("comparing"):
        found = compare(a, b)
    if as_json:
        told = {name: asdict(found)[name] for name in ("differences", "first_step", "first_part")}
        print_json({"same": found.same, **told})
        return 0 if found.same else 1
    for difference in found.differences:
        click.echo(difference.what)
        click.echo(f"  A  {difference.a}")
        click.echo(f"  B  {difference.b}")
    if found.free:
        note(f"these keys differ, and decide no weights: {', '.join(found.free)}")
    if found.same:
        click.echo("the same: config, text, merges, losses, weights and moments, bit for bit")
        return 0
    if found.first_step is not None:
        place = f"step {found.first_step}" if found.first_step else "the start"
        part = f", in its {found.first_part}" if found.first_part else ""
        click.echo(f"They part at {place}{part}.")
    click.echo(found.advice)
    return 1
