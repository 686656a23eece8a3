"""The cache keeps tokens and merges in a folder, under the hash of what made them.

A reader finds all of a file or nothing: the SHA-256 of its name and content stands at its end.
"""

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from minigen.errors import MinigenError
from minigen.files import explained, replacing
from minigen.paths import expand, home_is_known
from minigen.text.documents import BLOCK

_FORMAT = "minigen tokens 4"
_SEAL = hashlib.sha256().digest_size
_BYTES = np.dtype("<u2")


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


class TokenFile:
    """A token file that is open, of T tokens: what is asked for is read."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Open a file; raises MinigenError where there is none that is whole."""
        self._path, self.dtype = path, dtype
        with explained(f"cannot read {path}"):
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            self._size = _check(self._file, path) // dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy, or a pickle, open the file again."""
        return TokenFile, (self._path, self.dtype)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return the tokens from ``part.start`` to before ``part.stop``."""
        return self.windows(np.array([part.start]), part.stop - part.start).ravel()

    def windows(self, starts: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Return ``width`` tokens from each start on (N, width)."""
        read = []
        with explained(f"cannot read {self._path}"):
            for place in (starts * self.dtype.itemsize).tolist():
                read.append(_read_at(self._file, place, width * self.dtype.itemsize))
            tokens = np.frombuffer(bytearray().join(read), self.dtype)
            return tokens.reshape(len(starts), width)


Kept = NDArray[Any] | TokenFile
_SEEKING = threading.Lock()


def _read_at(file: IO[bytes], place: int, size: int) -> bytes:
    """Read from a place on, whoever else reads: threads and forked processes share a position."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, place)
    with _SEEKING:  # on Windows, which forks no process
        file.seek(place)
        return file.read(size)


def _check(file: IO[bytes], path: Path) -> int:
    """Return the size of a file's content, once its seal was found to be right."""
    digest = hashlib.sha256(path.name.encode())
    size = left = file.seek(0, os.SEEK_END) - _SEAL
    file.seek(0)
    while left > 0 and (block := file.read(min(left, BLOCK))):
        digest.update(block)
        left -= len(block)
    if file.read() != digest.digest():
        raise ValueError("it is damaged")
    return size


def keep(
    folder: Path | None,
    *recipe: object,
    blocks: Iterable[NDArray[Any]],
    dtype: np.dtype[Any] = _BYTES,
) -> Kept:
    """Return tokens that come in blocks: in a file of the folder, or, without one, in memory.

    The file is found again by its recipe, which is all that the blocks depend on. Raises
    MinigenError where there is no room, or no right.
    """
    if folder is None:
        return np.concatenate(list(blocks))
    key = json.dumps([_FORMAT, *recipe]).encode()
    # Absolute, since a copy of a run may open it again from elsewhere.
    path = folder.absolute() / f"{hashlib.sha256(key).hexdigest()}.tokens"
    with suppress(MinigenError):
        return TokenFile(path, dtype)
    cure = "; set MINIGEN_CACHE to a folder with room"
    with explained(f"cannot keep tokens in {folder}", cure):
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(path.name.encode())
        with replacing(path) as file:
            for block in blocks:
                data = block.astype(dtype).tobytes()
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
    return TokenFile(path, dtype)
