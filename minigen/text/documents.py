"""A text is one string of characters, read in blocks from files, folders, pipes or memory.

Each character stands for a byte (see `tokenizer.py`) or is the `<|endoftext|>` around documents:

    <|endoftext|> document <|endoftext|> document <|endoftext|> … document <|endoftext|>
"""

import hashlib
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Literal

import numpy as np

from minigen.errors import MinigenError, OptionError
from minigen.text.tokenizer import END_OF_TEXT_CHARACTER, characters

Documents = Literal["file", "paragraph", "line"]
Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done and how much there is."""

LARGE = 64 << 20
"""A text of more bytes, and its tokens, are kept in files."""
BLOCK = 1 << 16
"""How many bytes or tokens are worked on at a time: so many stay in the processor's cache."""

_END = END_OF_TEXT_CHARACTER
# The look ahead and the + that give nothing back make it fast; they change no match.
_BLANK_LINES = re.compile(r"\n(?=\s)(?:[ \t]*+\r?\n)++")


@dataclass(frozen=True)
class Source:
    """A file, or what takes its place, that can be opened and read again and again."""

    name: str
    size: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes from the first on; raises MinigenError where they cannot be read."""
        with _reading(self.name), self.open() as file:
            file.seek(0)
            while block := file.read(BLOCK):
                yield block


def find(path: str | Path) -> list[Source]:
    """Return the files that a path stands for: itself, or those in a folder and below.

    `"-"` is standard input. Hidden files do not count; the order is that of the relative paths as
    bytes. Raises MinigenError where there are none.
    """
    if str(path) == "-":
        return [_spooled("standard input", sys.stdin.buffer)]
    files = [path := Path(path)]
    with _reading(str(path)):
        if path.is_dir():
            files = sorted(_visible(path), key=lambda file: os.fsencode(file.relative_to(path)))
            if not files:
                raise MinigenError(f"folder {path} has no files (hidden ones do not count)")
        elif path.exists() and not path.is_file():
            with path.open("rb") as pipe:
                return [_spooled(str(path), pipe)]
        return [_on_disk(file) for file in files]


def _on_disk(path: Path) -> Source:
    return Source(str(path), path.stat().st_size, lambda: path.open("rb", buffering=0))


def in_memory(text: str | bytes) -> Source:
    """Return a text as a file; a `str` is taken as UTF-8."""
    data = characters(text).encode("latin-1")
    return Source("the text", len(data), lambda: BytesIO(data))


def _visible(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if not entry.name.startswith("."):
            if entry.is_dir() and not entry.is_symlink():
                yield from _visible(entry)
            elif entry.is_file():
                yield entry


def _spooled(name: str, stream: IO[bytes]) -> Source:
    """Keep what can be read only once: in memory or, where it is large, in a temporary file."""
    spool = tempfile.SpooledTemporaryFile(LARGE)  # noqa: SIM115 (lives as long as the source)
    with _reading(name):
        while block := stream.read(BLOCK):
            spool.write(block)
    source = Source(name, spool.tell(), lambda: nullcontext(spool))
    weakref.finalize(source, spool.close)
    return source


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what the system says of a file that cannot be read into one line."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        name = getattr(error, "filename", None) or name
        cause = getattr(error, "strerror", None) or error
        raise MinigenError(f"cannot read {name}: {cause}") from error


class Text:
    """Files as one string of characters, cut into documents as `documents` says.

    `size` is in bytes; `sha256` is that of the bytes of one file, or of the digests of several,
    one after the other. `report` takes progress. Raises MinigenError where the text is empty.
    """

    def __init__(
        self, sources: Sequence[Source], documents: Documents, progress: Progress | None = None
    ) -> None:
        if documents not in ("file", "paragraph", "line"):
            raise OptionError(
                f'documents must be "file", "paragraph" or "line" (got {documents!r})'
            )
        self.documents = documents
        self.report = progress or (lambda phase, done, total: None)
        self._sources = sources
        self.size, self.sha256 = self._measure()
        if not self.size:
            names = ", ".join(source.name for source in sources[:3])
            raise MinigenError(
                f"the text must hold at least one byte (got 0 bytes in {len(sources)} "
                f"{'file' if len(sources) == 1 else 'files'}: {names})"
            )

    def _measure(self) -> tuple[int, str]:
        expected, size, digests = 0, 0, []
        for source in self._sources:
            expected += source.size
        for source in self._sources:
            digest = hashlib.sha256()
            for block in source.blocks():
                digest.update(block)
                size += len(block)
                self.report("hashing", size, expected)
            digests.append(digest)
        if len(digests) > 1:
            digests = [hashlib.sha256(b"".join(digest.digest() for digest in digests))]
        return size, digests[0].hexdigest() if digests else ""

    def characters(self) -> Iterator[str]:
        """Yield the text in blocks: each document between two `<|endoftext|>`, none empty."""
        last = ""
        for text in self._marked():
            if last == _END:
                text = text.removeprefix(_END)
            if text:
                last = text[-1]
                yield text

    def _marked(self) -> Iterator[str]:
        """Yield the text in blocks, one `<|endoftext|>` between documents, two between blocks."""
        edge = {"file": _END, "paragraph": "\n\n", "line": "\n"}[self.documents]
        done = 0
        for source in self._sources:
            held = edge
            for block in source.blocks():
                text = held + block.decode("latin-1")
                # What closes a document may go on in the next block (but is no megabyte long).
                body = text if self.documents == "file" else text.rstrip(" \t\r\n")
                body = body if len(text) - len(body) < 1 << 20 else text
                held = text[len(body) :]
                yield self._mark(body)
                done += len(block)
                self.report("reading", done, self.size)
            yield self._mark(held + edge)
        if done != self.size:
            raise MinigenError(
                f"the text has changed while it was read: {self.size} bytes, then {done}"
            )

    def _mark(self, text: str) -> str:
        """Put one `<|endoftext|>` in place of all that stands between two documents."""
        if self.documents == "file":
            return text.replace(_END + _END, _END)  # an empty file
        if self.documents == "paragraph":
            text = _BLANK_LINES.sub(_END, text)
            return text.replace("\r" + _END, _END) if "\r" in text else text
        text = text.replace("\r\n", "\n") if "\r" in text else text
        data = np.frombuffer(text.encode("latin-1"), np.uint8)
        ends = data == ord("\n")
        # An empty line ends where another one has just ended (numpy is fast at dropping them).
        is_kept = np.append(True, ~(ends[1:] & ends[:-1]))
        text = data[is_kept[: len(data)]].tobytes().decode("latin-1")
        return text.replace("\n", _END)
