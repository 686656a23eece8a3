"""stdout and stderr as the commands see them: no work and no verdict depends on who listens."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


def visible(text: str) -> str:
    """Escape what would command a terminal, or turn the direction of its text.

    >>> visible("a\\x1b[2J\\u202e")
    'a\\\\x1b[2J\\\\u202e'
    """
    return _COMMANDS.sub(lambda match: repr(match[0])[1:-1], text)


# Control characters but tab and line feed, marks and overrides of direction, line separators.
_COMMANDS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)


class Outlet:
    """A text stream that takes what is written when its pipe, disk or terminal has gone, too.

    On a terminal, stdout shows escapes for what would command it (stderr has progress bars to draw,
    so that whoever writes text there escapes it); into a pipe or a file all goes as it is.
    ``fault`` is the first error; what comes after it is dropped. Where ``raises`` is set, that
    error is raised: the command is there for its output alone.
    """

    def __init__(self, stream: TextIO, *, escapes: bool) -> None:
        self._stream = stream
        self._escapes = escapes and stream.isatty()
        self.raises = False
        self.fault: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; return how much, as if it could always be done."""
        shown = visible(text) if self._escapes else text
        self._attempt(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        """Flush, as if it could always be done."""
        self._attempt(self._stream.flush)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self.fault = self.fault or error
            # What waits in the stream's own buffer must go somewhere, at the exit at the latest.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self.raises:
                raise


@contextmanager
def outlets() -> Iterator[Outlet]:
    """Put an Outlet before stdout and stderr; yield that of stdout.

    Streams that the caller has closed lead nowhere. Output is UTF-8 whatever the locale, and lines
    end in a line feed everywhere.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file that is opened would take its place
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    old = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(encoding="utf-8", errors="replace", newline="\n")
            if name == "stderr":  # a line in one piece, unbuffered or not: others write there, too
                reconfigure(line_buffering=True, write_through=False)
        setattr(sys, name, Outlet(stream, escapes=name == "stdout"))
    out: Any = sys.stdout
    try:
        yield out
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = old
