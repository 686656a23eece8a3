"""The cache keeps tokens and merges in a folder, under the hash of what made them.

A reader finds all of a file or nothing: the SHA-256 of its name and content stands at its end.
"""

import hashlib
import json
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from minigen.errors import MinigenError
from minigen.files import explained, replacing
from minigen.paths import expand, home_is_known

_FORMAT = "minigen tokens 4"
_SEAL = hashlib.sha256().digest_size
_READ = 1 << 20


def default_folder() -> Path:
    """Return ``$MINIGEN_CACHE``, else the user's folder for caches."""
    with suppress(MinigenError):
        if named := os.environ.get("MINIGEN_CACHE"):
            return Path(expand(named))
        if caches := os.environ.get("XDG_CACHE_HOME"):
            return Path(expand(caches)) / "minigen"
        if home_is_known():
            return Path.home() / ".cache" / "minigen"
    raise MinigenError(
        "the tokens of a text above 64 MB are kept in a folder, and there is no home for it: set "
        f"MINIGEN_CACHE to a folder with room (it is {os.environ.get('MINIGEN_CACHE', '')!r})"
    )


def path_of(folder: Path, recipe: list[Any], kind: str) -> Path:
    """Return where the file of this kind is that a recipe makes."""
    key = json.dumps([_FORMAT, *recipe]).encode()
    return folder / f"{hashlib.sha256(key).hexdigest()}.{kind}"


def read(path: Path) -> bytes:
    """Return the content of a file; raises MinigenError where there is none that is whole."""
    with explained(f"cannot read {path}"), path.open("rb") as file:
        size = _check(file, path)
        file.seek(0)
        return file.read(size)


class TokenFile:
    """A token file that is open: ``array`` (T,) is all of it, mapped into memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Open a file; raises MinigenError where there is none that is whole."""
        self._path = path
        self._seeking = threading.Lock()  # between two threads, where to read from would change
        with explained(f"cannot read {path}"):
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            size = _check(self._file, path)
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self.array: NDArray[Any] = np.frombuffer(self._map, dtype, size // dtype.itemsize)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy, or a pickle, open the file again."""
        return TokenFile, (self._path, self.array.dtype)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the tokens from ``start`` to before ``stop``, in memory of their own.

        A page of the map, with up to 2 MB around it, counts as memory of this process once it is
        touched, and to map it takes longer than to read it.
        """
        with explained(f"cannot read {self._path}"), self._seeking:
            self._file.seek(start * self.array.itemsize)
            data = self._file.read((stop - start) * self.array.itemsize)
            return np.frombuffer(data, self.array.dtype)

    def windows(self, starts: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return ``width`` tokens from each start on (N, width)."""
        size, read = width * self.array.itemsize, []
        with explained(f"cannot read {self._path}"), self._seeking:
            for place in (starts * self.array.itemsize).tolist():
                self._file.seek(place)
                read.append(self._file.read(size))
        return np.frombuffer(bytearray().join(read), self.array.dtype).reshape(-1, width)


def _check(file: IO[bytes], path: Path) -> int:
    """Return the size of a file's content, once its seal was found to be right."""
    digest = hashlib.sha256(path.name.encode())
    size = left = file.seek(0, os.SEEK_END) - _SEAL
    file.seek(0)
    while left > 0 and (block := file.read(min(left, _READ))):
        digest.update(block)
        left -= len(block)
    if file.read() != digest.digest():
        raise ValueError("it is damaged")
    return size


def keep(path: Path, dtype: np.dtype[Any], blocks: Iterable[NDArray[Any]]) -> TokenFile:
    """Open a token file; where there is none that is whole, it is made of ``blocks``."""
    with suppress(MinigenError):
        return TokenFile(path, dtype)
    with writing(path) as write:
        for block in blocks:
            write(block.astype(dtype, copy=False).tobytes())
    return TokenFile(path, dtype)


@contextmanager
def writing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Write a file of the cache, piece by piece: a reader finds all of it or nothing.

    Raises MinigenError where there is no room, or no right.
    """
    cure = "; set MINIGEN_CACHE to a folder with room"
    with explained(f"cannot keep tokens in {path.parent}", cure):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            digest = hashlib.sha256(path.name.encode())

            def write(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            yield write
            file.write(digest.digest())
