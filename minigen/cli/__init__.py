"""The command line: the only part that reads a terminal, where every error becomes one line.

stdout carries results, stderr everything else. Exit status: 0 done, 1 a claim failed or something
that was read is wrong, 2 wrong usage, 130 interrupted.
"""

import importlib
import os
import pkgutil
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click

from minigen.errors import MinigenError, OptionError


class _Commands(click.Group):
    """The commands of this folder: whichever module says ``@cli.command()`` adds one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        for module in pkgutil.iter_modules(__path__):
            importlib.import_module(f"{__name__}.{module.name}")
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        self.list_commands(ctx)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; where the reader of stdout has seen enough, end quietly."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="minigen", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train a tiny text generator, and show that one config gives one fingerprint.

    MODEL is a checkpoint file or a run folder (its highest step). CONFIG is a TOML file or the
    name of a shipped one: fables (the default), bigram, names.

    \b
    Example:
      minigen train fables --out runs/fables
      minigen generate runs/fables "Once"
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, status: int) -> int:
    print("Error: " + " ".join(message.split("\n")), file=sys.stderr)
    return status


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; no error shows a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure:  # UTF-8 whatever the locale; text files end lines in \n everywhere
            reconfigure(encoding="utf-8", errors="replace", newline="\n")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = cli.main(arguments, prog_name="minigen", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except OptionError as error:
        return _fail(str(error), 2)
    except MinigenError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)


def main() -> NoReturn:
    """Entry point of the ``minigen`` command."""
    sys.exit(run())
