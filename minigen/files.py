"""The one safe writer: a file gets all of its new content, or stays as it was."""

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_STRAY = re.compile(r"\..+\.[0-9a-f]{16}\.unfinished", re.DOTALL)
_STALE = 3600
"""Seconds in which a writer that is alive writes something, where it cannot hold a lock."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of `path` in the end, once it is on the disk.

    Until then it is hidden beside it, under a name that nobody can foresee, and locked; what
    writers left there that were killed is removed. Raises OSError.
    """
    _remove_strays(path.parent)
    file = _new(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        with suppress(OSError):  # not every system can do that with a folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        with suppress(OSError):  # it has its place already
            os.unlink(file.name)


def _new(path: Path) -> IO[bytes]:
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
        file = temporary.open("xb")  # never through a link; the umask decides who may read
        if _lock(file) is not False and temporary.exists():
            return file
        file.close()  # another process took it for a stray before it was locked


def _lock(file: IO[bytes]) -> bool | None:
    """Lock a file until it is closed: whether it could be done; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def _remove_strays(folder: Path) -> None:
    """Remove what our own writers left that were killed, and nothing of anybody else."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _STRAY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                # Another one may be faster, or it is another user's.
                with suppress(OSError), open(entry.path, "rb") as file:
                    locked, age = _lock(file), time.time() - entry.stat().st_mtime
                    if locked or (locked is None and age > _STALE):
                        os.unlink(entry.path)
