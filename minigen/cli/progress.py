"""What commands say on stderr while they work: notes, and bars where somebody watches."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any

import click

from minigen.cli.outlets import visible

if TYPE_CHECKING:
    from tqdm import tqdm

    from minigen.text.documents import Progress

_LONG = 4 << 20  # bytes of a text that take a second or more
_TICK = 1.0  # seconds

progress_option = click.option(
    "--progress/--no-progress",
    default=None,
    help="Show progress bars; by default only on a terminal. Else a line says what begins.",
)


def line(message: object) -> str:
    """Return a message in one line, without what would command a terminal that it is shown on.

    A traceback, which some libraries put into what they warn of, is left out.
    """
    text = " ".join(str(message).partition("\nTraceback (most recent")[0].splitlines())
    return visible(text) if sys.stderr.isatty() else text


@cache
def _tqdm() -> Any:
    """Return the class of bars, imported when there is one, or a note, to show."""
    from tqdm import tqdm

    # Its own lock is one between processes: a helper that is ended would leave it behind.
    tqdm.set_lock(RLock())
    return tqdm


def note(message: str) -> None:
    """Say something on stderr, above a progress bar if one is there."""
    text = visible(message) if sys.stderr.isatty() else message
    _tqdm().write(f"{text}\n", file=sys.stderr, end="")  # in one piece, whoever else writes there


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def notes_of_libraries() -> Iterator[None]:
    """Show what a library warns of, and what minigen's own logs, as notes are shown."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        note(f"Warning: {line(message)}")

    log, handler = logging.getLogger("minigen"), _Notes()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("default", category=UserWarning)  # a note ends no work
            warnings.showwarning = show
            yield
    finally:
        log.removeHandler(handler)


@contextmanager
def bar(progress: bool | None, begins: str, **settings: Any) -> "Iterator[tqdm[Any]]":
    """Show how far something has come; where no bar is shown, say in a line that it begins.

    ``progress`` is what the user said; else there is a bar on a terminal alone. Its clock goes on
    however long the next step takes. ``begins`` may be empty: then nothing is said.
    """
    shows = sys.stderr.isatty() if progress is None else progress
    if begins and not shows:
        note(begins)
    is_over = Event()
    with _tqdm()(disable=not shows, **settings) as shown:

        def tick() -> None:
            while not is_over.wait(_TICK):
                shown.refresh()

        clock = Thread(target=tick, daemon=True)
        if shows:
            clock.start()
        try:
            yield shown
        finally:
            is_over.set()
            if shows:
                clock.join()


def clock(what: str) -> "AbstractContextManager[tqdm[Any]]":
    """Show on a terminal, while it lasts, what is under way and for how long."""
    return bar(None, "", bar_format=f"{what} [{{elapsed}}]", leave=False)


@contextmanager
def reading_progress(progress: bool | None) -> "Iterator[Progress]":
    """Give ``corpus.load`` a bar to report the bytes it has read to; a long text is noted, too."""
    with bar(progress, "", desc="reading", unit="B", unit_scale=True, leave=False) as shown:
        phase = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal phase
            if shown.disable and what != phase and total >= _LONG:
                note(f"{what}: {total / 1e6:.0f} MB")
            phase = what
            shown.set_description_str(what, refresh=False)
            shown.total = total
            shown.update(done - shown.n)

        yield report
