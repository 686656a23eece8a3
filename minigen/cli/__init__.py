"""The command line: the only part that reads a terminal, where every error becomes one line.

stdout carries results, stderr everything else. Exit status: 0 done, 1 a claim failed or something
that was read is wrong (or a result cannot be written), 2 wrong usage, 130 interrupted. A pipe that
nobody reads ends an answer quietly, and changes no work and no verdict.
"""

import errno
import gc
import importlib
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType
from typing import Any, NoReturn

import click
from click.exceptions import NoSuchCommand

from minigen.cli.outlets import outlets
from minigen.cli.progress import line, notes_of_libraries
from minigen.errors import MinigenError, OptionError, listed
from minigen.signals import STOP_SIGNALS, heard_by, let_pass

_MOMENT = 0.05  # seconds


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
        """Run the command; return its status, or what click would read more into than it says."""
        try:
            return super().invoke(ctx)
        # To click, a file that ends too soon is an interruption, and any broken pipe is stdout.
        except (EOFError, OSError, KeyboardInterrupt) as error:
            return error


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(message="%(prog)s %(version)s")
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


class _Interruption:
    """Turns the first signal to stop into KeyboardInterrupt, and knows that it came.

    Launchers send some signals twice, which must not disturb what the first one has set going; a
    user who presses Ctrl-C again means it.
    """

    came = 0  # the number of the signal

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT or not self.came:
            self.came = number
            raise KeyboardInterrupt

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Send a signal again that came while an object was removed: nothing is raised there."""
        former = sys.unraisablehook

        def repeat(lost: "sys.UnraisableHookArgs") -> None:
            if lost.exc_type is not KeyboardInterrupt:
                former(lost)
                return
            number, self.came = self.came, 0
            Timer(_MOMENT, os.kill, (os.getpid(), number)).start()

        sys.unraisablehook = repeat
        try:
            yield
        finally:
            sys.unraisablehook = former


def _fail(message: object, status: int) -> int:
    print(f"Error: {line(message)}", file=sys.stderr)
    return status


def _cure(error: click.ClickException) -> str:
    """Say what is most often meant by words that click cannot place."""
    if isinstance(error, click.NoSuchOption) and not error.possibilities:
        if error.ctx and any("--set" in param.opts for param in error.ctx.command.params):
            return "a key of the config is given as --set KEY=VALUE"
        return "a text that begins with - comes last, behind --"
    if isinstance(error, NoSuchCommand):  # perhaps an option
        option, known = f"--{error.command_name}", {"": cli, **cli.commands}
        ways = [
            " ".join(["minigen", *name.split(), option])
            for name, command in known.items()
            if error.ctx and any(option in param.opts for param in command.get_params(error.ctx))
        ]
        return f"there is {listed(ways[:2], 'or')}" if ways else ""
    return "words that belong together stand in quotes" * ("unexpected extra" in error.message)


def _tell(error: BaseException) -> int:
    """Say in one line what went wrong; return the exit status."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):  # of click's completion
        return error.code
    if isinstance(error, click.ClickException):
        cure = f" ({cure})" if (cure := _cure(error)) else ""
        return _fail(f"{error.format_message()}{cure}", error.exit_code)
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return _fail("interrupted", 130)
    if isinstance(error, MinigenError):
        return _fail(error, 2 if isinstance(error, OptionError) else 1)
    if isinstance(error, MemoryError):
        return _fail(f"there is not enough memory: {error}".rstrip(": "), 1)
    if isinstance(error, OSError):
        cause = error.strerror or error
        return _fail(f"{error.filename}: {cause}" if error.filename else cause, 1)
    if isinstance(error, ImportError):
        cure = "install minigen again, with all that it needs (pip install .)"
        return _fail(f"{error.name or 'a library'} cannot be loaded: {error}; {cure}", 1)
    # What a library raised, or a fault of ours: where it happened helps whoever mends it.
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"(at {os.path.basename(last.filename)}:{last.lineno})"
    return _fail(f"unexpected {type(error).__name__}: {error} {where}; please report it", 1)


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; no error shows a traceback."""
    interruption = _Interruption()
    with outlets() as out, heard_by(interruption), interruption.repeated():
        try:
            with notes_of_libraries():
                result = cli.main(arguments, prog_name="minigen", standalone_mode=False)
            if isinstance(result, BaseException):
                raise result
            status = result if isinstance(result, int) else 0
        except BaseException as error:  # some libraries raise what is not even an Exception
            with heard_by(let_pass):
                # An interruption makes some libraries fail in other ways, too.
                cause = KeyboardInterrupt() if interruption.came else error
                status = 0 if cause is out.fault else _tell(cause)
        out.raises = False
        out.flush()
        if out.fault and out.fault.errno != errno.EPIPE:
            status = _fail(f"cannot write to stdout: {out.fault.strerror}", status or 1)
        return status


def main() -> NoReturn:
    """Entry point of the ``minigen`` command."""
    status = run()
    for number in STOP_SIGNALS:  # all is said and saved: nothing is left to interrupt
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # Python would look for cycles among what is left, 0.1 s long after a training
    sys.exit(status)
