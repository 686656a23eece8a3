"""The one safe writer, the one owner of a folder, and what is said where the system refuses.

A file gets all of its new content, or stays as it was. One process at a time writes to a folder.
"""

import os
import re
import secrets
import stat
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from minigen.errors import MinigenError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_STRAY = re.compile(r"\..+\.[0-9a-f]{16}\.unfinished", re.DOTALL)
_STALE = 3600
"""Seconds in which a writer that is alive writes something, where it cannot hold a lock."""


@contextmanager
def explained(what: str, cure: str = "") -> Iterator[None]:
    """Turn what the system refuses into a MinigenError: what could not be done, and why."""
    try:
        yield
    except MinigenError:  # which says it already
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise MinigenError(f"{what}: {getattr(error, 'strerror', None) or error}{cure}") from error


def opened(path: Path) -> IO[bytes]:
    """Open a regular file to read it: a pipe would be waited for, a device read without end.

    Raises FileNotFoundError where there is none, else MinigenError.
    """
    try:
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    except FileNotFoundError:
        raise
    except OSError as error:
        raise MinigenError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise MinigenError(f"cannot read {path}: it is not a regular file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of ``path`` in the end, once it is on the disk.

    Until then it is hidden beside it, under a name that nobody can foresee, and locked; what
    writers left there that were killed is removed. Raises OSError.
    """
    remove_strays(path.parent)
    file = _new(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        sync(path.parent)
    finally:
        with suppress(OSError):  # it has its place already
            os.unlink(file.name)


def write_atomically(path: str | Path, *parts: bytes | memoryview) -> None:
    """Write the parts, end to end, as the file ``path``: all of them, or it stays as it was.

    Of a link, the file it leads to is meant; a pipe or a device is written to, as it comes. Raises
    MinigenError where that fails.
    """
    path = Path(path)
    with explained(f"cannot save {path}", "; nothing was changed"):
        if path.is_dir():
            raise MinigenError(f"cannot save {path}: it is a folder; name a file in it")
        # What a link leads to may have no name of its own, as the pipe of /dev/stdout.
        is_special = path.exists() and not path.is_file()
        target = path.resolve() if path.is_symlink() else path
        with open(path, "wb") if is_special else replacing(target) as file:
            for part in parts:
                file.write(part)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _new(path: Path) -> IO[bytes]:
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
        file = temporary.open("xb")  # never through a link; the umask decides who may read
        if _lock(file) is not False and temporary.exists():
            return file
        file.close()  # another process took it for a stray before it was locked


class Ownership:
    """A folder is this process's to write to, as long as this object is kept.

    The lock is the system's, on the folder itself: it leaves no file, and dies with its process.
    Who takes the folder again in that process has the same object.
    """

    writer: int | None = None  # the id of what may write there now
    release: Callable[[], object]


_owned: "weakref.WeakValueDictionary[tuple[int, int], Ownership]" = weakref.WeakValueDictionary()


def _disown() -> None:
    """Leave what this forked process seems to own to the one that it came from."""
    for owned in [*_owned.values()]:
        owned.release()  # its own descriptor, which would keep the lock when the other one ends
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def own(folder: Path) -> Ownership | None:
    """Own a folder; None where a system has no locks. Raises MinigenError where another does."""
    if fcntl is None:
        return None
    with explained(f"cannot read folder {folder}"):
        descriptor = os.open(folder, os.O_RDONLY)
        place = os.fstat(descriptor)
    key = place.st_dev, place.st_ino
    if owned := _owned.get(key):
        os.close(descriptor)
        return owned
    owned = Ownership()
    owned.release = weakref.finalize(owned, os.close, descriptor)
    if (locked := _lock(descriptor)) is False:
        raise MinigenError(
            f"{folder} is being written to by {_owner(descriptor)}: wait for its end, or name "
            "another folder with --out"
        )
    if locked is None:
        warnings.warn(
            f"{folder} cannot be locked here: start no second process that writes to it",
            stacklevel=2,
        )
    _owned[key] = owned
    return owned


def _owner(descriptor: int) -> str:
    """Say which process holds the lock of a file that is open, where Linux tells."""
    with suppress(OSError, ValueError, IndexError):
        inode = str(os.fstat(descriptor).st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode and int(fields[4]):
                return f"process {fields[4]}"
    return "another process"


def _lock(file: IO[bytes] | int) -> bool | None:
    """Lock a file until it is closed: whether it could be done; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def remove_strays(folder: Path) -> None:
    """Remove what our own writers left that were killed, and nothing of anybody else."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _STRAY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                # Another one may be faster, or it is another user's.
                with suppress(OSError), open(entry.path, "rb") as file:
                    locked, age = _lock(file), time.time() - entry.stat().st_mtime
                    if locked or (locked is None and age > _STALE):
                        os.unlink(entry.path)
