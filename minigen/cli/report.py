"""``report`` writes one HTML page about a run, to be opened in any browser."""

import click

from minigen.cli import cli
from minigen.cli.options import PATH
from minigen.cli.training import write_page


@cli.command()
@click.argument("run", type=PATH)
@click.option(
    "--out", type=PATH, metavar="FILE", help="Where to write.  [default: report.html in RUN]"
)
def report(run: str, out: str | None) -> None:
    """Write a page about RUN, a run folder or a checkpoint.

    It holds charts and samples, and generates text in JavaScript, with the same bits as Python. It
    needs no network, and pip install 'minigen[report]' to be written.

    \b
    Example:
      minigen report runs/fables --out fables.html
    """
    write_page(run, out)
