"""A text is one string of characters, read in blocks from files, folders, pipes or memory.

Each character stands for a byte (see ``tokenizer.py``) or is ``<|endoftext|>`` around documents:

    <|endoftext|> document <|endoftext|> document <|endoftext|> … document <|endoftext|>
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import tomllib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Literal

from minigen.errors import MinigenError, OptionError
from minigen.files import explained
from minigen.text.tokenizer import END_OF_TEXT_CHARACTER, Text, to_bytes

Documents = Literal["file", "paragraph", "line"]
Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done and how much there is."""

LARGE = 64 << 20
"""A text of more bytes, and its tokens, are kept in files."""
BLOCK = 1 << 16
"""How many bytes or tokens are worked on at a time: so many stay in the processor's cache."""

MARK = b"\xef\xbb\xbf"
"""UTF-8's byte-order mark: at the start of a file or a prompt it is not part of the text."""

_END = END_OF_TEXT_CHARACTER
_LINE_END = re.compile(rb"\r{0,2}\n|\r")
# A line ends in LF, CR LF, CR CR LF or CR. Where the next one is blank, all that follow and are
# blank are taken. No group gives nothing back, as (?>…) and (…)++ do: Python 3.11 before .5 loses
# what stands behind.
_BLANK_LINES = re.compile(r"(?:\r{0,2}\n|\r(?!\r?\n))(?=[ \t\r\n])[ \t\r\n]*[\r\n]")


def _mark_lines(text: str) -> str:
    text = text.replace("\r", "\n")  # twice as fast as a regular expression
    while "\n\n" in text:  # an empty line
        text = text.replace("\n\n", "\n")
    return text.replace("\n", _END)


# What parts the documents at the edges of a file, and what puts one mark where it stands in a text.
_BETWEEN: dict[str, tuple[str, Callable[[str], str]]] = {
    "file": (_END, lambda text: text.replace(_END + _END, _END)),  # an empty file
    "paragraph": ("\n\n", partial(_BLANK_LINES.sub, _END)),
    "line": ("\n", _mark_lines),
}

_UNMEANT = re.compile(r"\.|[0-9a-f]{64}\.(tokens|merges)$")
"""The name of a file or folder that is hidden, or of a file of the token cache."""

# What a file that is no text begins with.
_SIGNATURES = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip (or a document in it)",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"%PDF-": "PDF",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"version https://git-lfs.github.com/spec/": "a Git-LFS pointer, not the file itself",
}


@dataclass(frozen=True)
class Source:
    """A file, or what takes its place, that can be opened and read again and again."""

    name: str
    size: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    is_file: bool = True  # and no text that a program has made

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes from the first on; raises MinigenError where they cannot be read."""
        with explained(f"cannot read {self.name}"), self.open() as file:
            file.seek(0)
            while block := file.read(BLOCK):
                yield block


def looks_like(start: bytes) -> str | None:
    """Say what a file is by its first bytes, where it seems to be something other than text."""
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature):
            return kind
    start = start[:4096]
    if b"\0" not in start:
        return None
    return "binary data" if any(start[::2]) and any(start[1::2]) else "UTF-16"


def whole(data: bytes) -> bytes:
    """Return a text as it is meant: without a byte-order mark and the end of its last line."""
    data = data.removeprefix(MARK)
    return data[:-3] + re.sub(rb"(\r{0,2}\n|\r)\Z", b"", data[-3:])


def lines(data: bytes) -> list[bytes]:
    """Cut a file into lines, whether they end in LF, CR LF, CR CR LF or CR; none of nothing."""
    return _LINE_END.split(whole(data)) if data.removeprefix(MARK) else []


def passes(path: str | Path) -> bool:
    """Whether a path is one that can be read only once: standard input, a pipe, a terminal."""
    is_there = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return str(path) == "-" or is_there


def find(path: str | Path) -> list[Source]:
    """Return the files that a path stands for: itself, or those in a folder and below.

    ``"-"`` is standard input. In a folder, regular files count that are not hidden; folders of runs
    and files of the cache, which a training makes, do not, nor do links to folders: of those, and
    of runs, a warning tells. The order is that of the relative paths as bytes. Raises MinigenError
    where there is no file.
    """
    if str(path) == "-":
        return [_spooled("standard input", sys.stdin.buffer)]
    path = Path(path)
    with explained(f"cannot read {path}"):
        if not path.is_dir():
            if not passes(path):
                return [_on_disk(path)]
            with path.open("rb") as pipe:
                return [_spooled(str(path), pipe)]
    files = sorted(_visible(path), key=lambda file: os.fsencode(file.relative_to(path)))
    if not files:
        raise MinigenError(f"folder {path} has no files (hidden ones do not count)")
    return [*map(_on_disk, files)]


def _on_disk(path: Path) -> Source:
    def open_() -> IO[bytes]:
        return open(path, "rb", opener=_open)

    with explained(f"cannot read {path}"), open_() as file:
        return Source(str(path), os.fstat(file.fileno()).st_size, open_)


def in_memory(text: Text) -> Source:
    """Return a text as a file; a ``str`` is taken as UTF-8."""
    data = to_bytes(text)
    return Source("the text", len(data), lambda: BytesIO(data), is_file=False)


def _visible(root: Path) -> Iterator[Path]:
    """Yield the files of a folder that are text, in any order."""
    unread, left_out = [root], []
    while unread:
        folder = unread.pop()
        with _entries(folder) as entries:
            names = {entry.name: entry for entry in entries if not _UNMEANT.match(entry.name)}
            if folder != root and _is_run(folder, names):
                left_out.append(f"{folder} is a run")
                continue
            for name, entry in names.items():
                path = folder / name
                with explained(f"cannot read {path}"):  # which a link to nothing cannot be
                    if entry.is_dir(follow_symlinks=False):
                        unread.append(path)
                    elif entry.is_dir():
                        left_out.append(f"{path} is a link to a folder")
                    elif stat.S_ISREG(entry.stat().st_mode):
                        yield path
    if left_out:
        more = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        warnings.warn(f"left out of the text: {left_out[0]}{more}", stacklevel=2)


def _is_run(folder: Path, names: dict[str, Any]) -> bool:
    """Whether a folder is that of a run, at whatever moment it was left."""
    if "config.toml" not in names or not names["config.toml"].is_file():
        return False
    if any(re.fullmatch(r"step-\d+\.safetensors", name) for name in names):
        return True
    try:
        with open(folder / "config.toml", "rb", opener=_open) as file:
            tables = tomllib.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return {"run", "corpus", "tokenizer", "model", "training", "optimizer"} <= tables.keys()


@contextmanager
def _entries(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Give the entries of a folder, however long its path is."""
    with explained(f"cannot read {folder}"), ExitStack() as stack:
        place: Path | int = folder
        if os.scandir in os.supports_fd:
            place = _open(str(folder), os.O_RDONLY)
            stack.callback(os.close, place)
        yield stack.enter_context(os.scandir(place))


def _open(path: str, flags: int) -> int:
    """``os.open`` in as many steps as a path needs: a system takes some 4,000 bytes at once."""
    try:
        return os.open(path, flags)
    except OSError as error:
        cut = path.find("/", max(1, len(path) - 1000))
        if error.errno != errno.ENAMETOOLONG or cut == -1:
            raise
    folder = _open(path[:cut], os.O_RDONLY)
    try:
        return os.open(path[cut + 1 :], flags, dir_fd=folder)
    finally:
        os.close(folder)


def _spooled(name: str, stream: IO[bytes]) -> Source:
    """Keep what can be read only once: in memory or, where it is large, in a temporary file."""
    spool = tempfile.SpooledTemporaryFile(LARGE)  # noqa: SIM115 (lives as long as the source)
    with explained(f"cannot read {name}"):
        shutil.copyfileobj(stream, spool)
    source = Source(name, spool.tell(), lambda: nullcontext(spool))
    weakref.finalize(source, spool.close)
    return source


class Reader:
    """Files as one string of characters, cut into documents as ``documents`` says.

    A byte-order mark of UTF-8 at the start of a file is no part of the text. All other bytes are,
    but a warning tells of a file that looks like something other than text.
    ``size`` is in bytes; ``sha256`` is that of the bytes of one file, or of the digests of several,
    one after the other, with a hyphen and their number behind it: a file that holds those digests
    has no such hash. ``report`` takes progress. Raises MinigenError where the text is empty.
    """

    def __init__(
        self, sources: Sequence[Source], documents: Documents, progress: Progress | None = None
    ) -> None:
        if documents not in _BETWEEN:
            raise OptionError(
                f'documents must be "file", "paragraph" or "line" (got {documents!r})'
            )
        self.documents = documents
        self.report = progress or (lambda phase, done, total: None)
        self._sources, self._digests, self.size = sources, list[bytes](), 0
        expected, strange = sum(source.size for source in sources), []
        for source in sources:
            digest = hashlib.sha256()
            for i, block in enumerate(source.blocks()):
                if i == 0 and source.is_file and (kind := looks_like(block)):
                    strange.append(f"{source.name} looks like {kind}")
                digest.update(block)
                self.size += len(block)
                self.report("hashing", self.size, expected)
            self._digests.append(digest.digest())
        if strange:
            more = f", and {len(strange) - 1} more no text either" if len(strange) > 1 else ""
            warnings.warn(f"{strange[0]}{more}; its bytes are taken as they are", stacklevel=2)
        if not self.size:
            names = ", ".join(source.name for source in sources[:3])
            raise MinigenError(
                f"the text must hold at least one byte (got 0 bytes in {len(sources)} "
                f"{'file' if len(sources) == 1 else 'files'}: {names})"
            )
        self.sha256 = self._digests[0].hex()
        if len(sources) > 1:
            self.sha256 = f"{hashlib.sha256(b''.join(self._digests)).hexdigest()}-{len(sources)}"

    def characters(self) -> Iterator[str]:
        """Yield the text in blocks: each document between two ``<|endoftext|>``, none empty."""
        last = ""
        for text in self._marked():
            if last == _END:
                text = text.removeprefix(_END)
            if text:
                last = text[-1]
                yield text

    def _marked(self) -> Iterator[str]:
        """Yield the text in blocks, one ``<|endoftext|>`` between documents, two between blocks."""
        edge, marked = _BETWEEN[self.documents]
        done, digests = 0, []
        for source in self._sources:
            held, digest = edge, hashlib.sha256()
            for i, block in enumerate(source.blocks()):
                digest.update(block)
                text = held + (block if i else block.removeprefix(MARK)).decode("latin-1")
                body = text
                if self.documents == "paragraph":  # what closes one may go on in the next block
                    body = text.rstrip(" \t\r\n")
                held = text[len(body) :]
                if len(held) > BLOCK:  # however long it becomes, it means no more than this
                    cut = max(len(held.rstrip("\r")), len(held) - 2)  # CRs that may belong to an LF
                    held = _BLANK_LINES.sub("\n\n", held[:cut]) + held[cut:]
                yield marked(body)
                done += len(block)
                self.report("reading", done, self.size)
            digests.append(digest.digest())
            yield marked(held + edge)
        if digests != self._digests:
            raise MinigenError(
                f"the text has changed while it was read: {self.size} bytes, then {done}"
                f"{'' if done != self.size else ' that are others'}"
            )
