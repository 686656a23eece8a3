"""A token file keeps tokens in a folder, under the hash of what made them.

A reader finds all of it or nothing. It holds the tokens, and at its end their number.
"""

import hashlib
import json
import mmap
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from minigen.errors import MinigenError

_FORMAT = "minigen tokens 2"
_LENGTH = struct.Struct("<q")
_STALE = 3600
"""Seconds in which a builder that is alive writes something."""


def default_folder() -> Path:
    """Return `$MINIGEN_CACHE`, else the user's folder for caches."""
    if named := os.environ.get("MINIGEN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minigen"


def path_of(folder: Path, recipe: list[Any], kind: str) -> Path:
    """Return where the file of this kind is that a recipe makes."""
    key = json.dumps([_FORMAT, *recipe]).encode()
    return folder / f"{hashlib.sha256(key).hexdigest()}.{kind}"


class TokenFile:
    """A token file that is open: `array` (T,) is all of it, mapped into memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Open a file; raises MinigenError where there is none that is whole."""
        try:
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            (length,) = _LENGTH.unpack(self._map[-_LENGTH.size :])
            if length * dtype.itemsize != len(self._map) - _LENGTH.size:
                raise ValueError("it is not whole")
        except (OSError, ValueError, struct.error) as error:
            raise MinigenError(f"cannot read {path}: {error}") from error
        self.array: NDArray[Any] = np.frombuffer(self._map, dtype, length)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the tokens from `start` to before `stop`, in memory of their own.

        A page of the map, with up to 2 MB around it, counts as memory of this process once it is
        touched, and to map it takes longer than to read it.
        """
        self._file.seek(start * self.array.itemsize)
        return np.frombuffer(
            self._file.read((stop - start) * self.array.itemsize), self.array.dtype
        )

    def windows(self, starts: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return `width` tokens from each start on (N, width)."""
        size, read = width * self.array.itemsize, []
        for place in (starts * self.array.itemsize).tolist():
            self._file.seek(place)
            read.append(self._file.read(size))
        return np.frombuffer(bytearray().join(read), self.array.dtype).reshape(-1, width)


def keep(path: Path, dtype: np.dtype[Any], blocks: Iterable[NDArray[Any]]) -> TokenFile:
    """Open a token file; where there is none, it is made of `blocks`."""
    with suppress(MinigenError):
        return TokenFile(path, dtype)
    with writing(path) as file:
        for block in blocks:
            file.write(block.astype(dtype, copy=False).tobytes())
        file.write(_LENGTH.pack(file.tell() // dtype.itemsize))
    return TokenFile(path, dtype)


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file of the cache: a reader finds all of it or nothing.

    Raises MinigenError where there is no room, or no right.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stray in path.parent.glob("*.tmp"):  # left by builders that were killed
            if time.time() - stray.stat().st_mtime > _STALE:
                stray.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise MinigenError(
            f"cannot keep tokens in {path.parent}: {error.strerror or error}; "
            "set MINIGEN_CACHE to a folder with room"
        ) from error
