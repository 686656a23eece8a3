"""A token file keeps the tokens of a text in a folder, under the hash of what made them.

It holds the tokens of the training part, those of the validation part, and a footer. A reader
finds all of it or nothing, and maps it into memory.
"""

import hashlib
import json
import mmap
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from minigen.errors import MinigenError

_MAGIC = b"minigen tokens 1"
_FOOTER = struct.Struct("<16sqq")  # the magic; tokens of the training part; bytes of all tokens
_STALE = 3600
"""Seconds in which a builder that is alive writes something."""


def default_folder() -> Path:
    """Return `$MINIGEN_CACHE`, else the user's folder for caches."""
    if named := os.environ.get("MINIGEN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minigen"


def path_of(folder: Path, recipe: list[Any], kind: str) -> Path:
    """Return where the file of this kind is that a recipe makes."""
    key = json.dumps([_MAGIC.decode(), *recipe]).encode()
    return folder / f"{hashlib.sha256(key).hexdigest()}.{kind}"


class TokenFile:
    """A token file that is open: `array` (T,) is all of it, mapped into memory.

    `training_size` is how many tokens are the training part's.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Open a file; raises MinigenError where there is none that is whole."""
        try:
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, self.training_size, size = _FOOTER.unpack(self._map[-_FOOTER.size :])
            if magic != _MAGIC or size != len(self._map) - _FOOTER.size:
                raise ValueError("it is not a whole token file")
        except (OSError, ValueError, struct.error) as error:
            raise MinigenError(f"cannot read {path}: {error}") from error
        self.array: NDArray[Any] = np.frombuffer(self._map, dtype, size // dtype.itemsize)

    def windows(self, starts: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return `width` tokens from each start on (N, width), by reading them.

        For tokens far apart: a page of the map, with up to 2 MB around it, counts as memory of
        this process once it is touched, and to map it takes longer than to read from it.
        """
        size, read = width * self.array.itemsize, []
        for place in (starts * self.array.itemsize).tolist():
            self._file.seek(place)
            read.append(self._file.read(size))
        return np.frombuffer(bytearray().join(read), self.array.dtype).reshape(-1, width)

    def release(self) -> None:
        """Give the pages of the map back to the system, which keeps them while it can."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def keep(path: Path, dtype: np.dtype[Any], write: Callable[[IO[bytes]], int]) -> TokenFile:
    """Open a token file; where there is none, `write` writes it.

    `write` returns how many tokens are the training part's.
    """
    with suppress(MinigenError):
        return TokenFile(path, dtype)
    with writing(path) as file:
        training_size = write(file)
        size = file.seek(0, os.SEEK_END)
        file.write(_FOOTER.pack(_MAGIC, training_size, size))
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
