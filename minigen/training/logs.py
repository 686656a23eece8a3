"""The logs of a run folder: a JSON object a line, appended as the run goes on.

A checkpoint vouches for all that stood in them when it was saved, by length and SHA-256. So a line
that was lost, doubled or changed since is noticed before a run goes on.
"""

import hashlib
import json
import math
import os
import stat
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minigen.errors import MinigenError
from minigen.exact.streams import MOST_WORDS
from minigen.files import opened

METRICS, SAMPLES, TIMING = "metrics.jsonl", "samples.jsonl", "timing.jsonl"
LOGS = (METRICS, SAMPLES, TIMING)
VOUCHED = (METRICS, SAMPLES)  # the same bytes on every machine

_LONGEST = 1 << 26  # bytes of a line: more than any that is written
_BLOCK = 1 << 20
# Never through a link, never waiting for a pipe; as bytes where systems make a difference.
_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

Line = dict[str, Any]
State = dict[str, Any]
"""``bytes`` and ``sha256`` of a log, up to some step."""
NO_LOG: State = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}


class Log:
    """A log to append to behind its first ``size`` bytes; what is after them is cut off.

    It must be a regular file with one name: what is behind a link belongs to somebody else. Raises
    MinigenError where it is not, OSError where the system refuses.
    """

    def __init__(self, path: Path, size: int) -> None:
        require_own(path)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _OWN, 0o666)
        weakref.finalize(self, os.close, self._file)
        if size < os.fstat(self._file).st_size:
            os.ftruncate(self._file, size)
        with open(self._file, "rb", closefd=False) as file:
            self._digest = hashlib.file_digest(file, "sha256")
            self._size = file.tell()

    def append(self, line: Line) -> None:
        """Append a line, or leave the log as it was."""
        data = left = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._digest.update(data)
        self._size += len(data)

    def sync(self) -> State:
        """Bring the log to the disk; return what a checkpoint may vouch for then."""
        os.fsync(self._file)
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


def require_own(path: Path) -> None:
    """Raise MinigenError unless a log, if there is one, is a regular file with one name."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise MinigenError(
                f"{path} must be a regular file with one name, no link, pipe or device: put a copy "
                "of the log in its place"
            )


def fault(checkpoint: Path, vouched: Mapping[str, State] | None) -> str:
    """Say which log beside a checkpoint is not what it vouches for; nothing where both are.

    Raises MinigenError for one that cannot be read, which may be whole.
    """
    for name, state in (vouched or {}).items():  # which a loaded checkpoint has named rightly
        digest, left = hashlib.sha256(), state["bytes"]
        # Of a log that is not there, nothing is what it was.
        with suppress(FileNotFoundError), opened(checkpoint.parent / name) as file:
            while left and (block := file.read(min(left, _BLOCK))):
                digest.update(block)
                left -= len(block)
        if left or digest.hexdigest() != state["sha256"]:
            return f"{name} has lost, doubled or changed a line that {checkpoint.name} vouches for"
    return ""


def strange(folder: Path, vouched: Mapping[str, State], step: int) -> Path | None:
    """Return the first log that goes on, behind what is vouched for, with no line of a later step.

    A line that was cut short by a crash is nothing strange.
    """
    for name, state in vouched.items():
        data = b""
        with suppress(FileNotFoundError), opened(folder / name) as file:
            file.seek(state["bytes"])
            data = file.readline(_LONGEST)
        with suppress(ValueError):
            if not data.endswith(b"\n") or parse(data)["step"] > step:
                continue
        return folder / name
    return None


def end_of(path: Path, step: int) -> int:
    """Return where the lines of the steps up to ``step`` end, in bytes.

    Warns where that is before a line which cannot be read.
    """
    end = 0
    try:
        for line, size in _lines(path):
            if line["step"] > step:
                break
            end += size
    except MinigenError:
        warnings.warn(f"{path}: its lines from byte {end} on cannot be read", stacklevel=2)
    return end


def read_lines(path: Path) -> list[Line]:
    """Return the whole lines of a log; one that was cut short by a crash is left out.

    Each is an object of a ``step``, and of finite numbers, texts and lists of token ids. Raises
    MinigenError for anything else, since anybody may have written it.
    """
    return [line for line, _ in _lines(path)]


def parse(data: bytes) -> Line:
    """Read a line of a log; ValueError says what is wrong with it."""
    try:
        line = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(line, dict):
        raise ValueError("it is not an object")
    for key, value in line.items():
        if not (all(map(_is_id, value)) if isinstance(value, list) else _is_plain(value)):
            raise ValueError(f"{key} is missing or of the wrong kind")
    if not _is_id(line.get("step")):
        raise ValueError("step is missing or of the wrong kind")
    return line


def _lines(path: Path) -> Iterator[tuple[Line, int]]:
    """Yield the whole lines of a log and their lengths in bytes."""
    with suppress(FileNotFoundError), opened(path) as file:
        number = 0
        while (data := file.readline(_LONGEST)).endswith(b"\n") or len(data) == _LONGEST:
            number += 1
            try:
                line = parse(data)
            except ValueError as error:
                raise MinigenError(
                    f"{path} is damaged, line {number}: {error!s:.200}; resuming the run mends it"
                ) from None
            yield line, len(data)


def _is_plain(value: object) -> bool:
    if type(value) is int:
        return abs(value) < MOST_WORDS
    return type(value) is str or (type(value) is float and math.isfinite(value))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
