"""A corpus is a text cut into documents and tokens, part to train on and part to validate.

A text is read as one long string of characters (see `tokenizer.py`), block by block:

    <|endoftext|> document <|endoftext|> document <|endoftext|> … document <|endoftext|>

and so are its tokens, in one flat array. Each token after the first is one prediction.
"""

import glob
import hashlib
import json
import mmap
import os
import platform
import re
import struct
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from minigen.arithmetic import exact_sum
from minigen.errors import MinigenError, OptionError
from minigen.tokenizer import (
    BYTE_VOCABULARY,
    END_OF_TEXT,
    END_OF_TEXT_CHARACTER,
    ByteTokenizer,
    characters,
)

Documents = Literal["file", "paragraph", "line"]
Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done and how much there is."""

FABLES = Path(__file__).parent / "corpora" / "fables.txt"
LARGE = 64 << 20
"""A text of more bytes, and its tokens, are kept in files."""
LEARN_FROM = 32 << 20
"""Merges are learned from about so many bytes of a text that has more."""

_BLOCK = 1 << 20
_END = END_OF_TEXT_CHARACTER
_BLANK_LINES = re.compile(r"\n(?=\s)(?:[ \t]*\r?\n)+")  # the look ahead makes it fast
_LINE = re.compile(f"[^\n{_END}]{{1,4096}}[\n{_END}]?|[\n{_END}]")
_MAGIC = b"minigen tokens 1"
_FOOTER = struct.Struct("<16sqq")  # the magic; tokens of the training part; bytes of all tokens
_MACHINE = platform.node()


class Tokens:
    """The predictions of a flat array of tokens (T + 1,) that opens and ends with `<|endoftext|>`.

    Prediction i, from 0 to T - 1, has token i + 1 as its target and the tokens up to i as its
    context. `array` may be a file that is mapped into memory; `blocks` goes through it without
    filling the memory.
    """

    def __init__(
        self,
        array: NDArray[Any],
        tokenizer: ByteTokenizer,
        file: IO[bytes] | None = None,
        mapped: mmap.mmap | None = None,
        start: int = 0,
    ) -> None:
        """Hold an array, or the part from token `start` on of a file that is mapped into memory."""
        self.array = array
        self._tokenizer = tokenizer
        self._file = file
        self._map = mapped
        self._start = start

    def __len__(self) -> int:
        return len(self.array) - 1

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all T + 1 tokens, about a million at a time."""
        for start in range(0, len(self.array), _BLOCK):
            yield self.array[start : start + _BLOCK]
            self._release()

    @cached_property
    def bytes(self) -> int:
        """The number of bytes of text, `<|endoftext|>` not counted."""
        vocab_size = self._tokenizer.vocab_size
        sizes = np.array([len(self._tokenizer.token_bytes(i)) for i in range(vocab_size)])  # (V,)
        counts = np.zeros(vocab_size, np.int64)  # (V,)
        for block in self.blocks():
            counts += np.bincount(block, minlength=vocab_size)
        return int(exact_sum(counts * sizes))

    def contexts_and_targets(
        self, indices: NDArray[np.int64], context_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the contexts (N, K), oldest token first, and the targets (N,) of predictions.

        A context ends at the start of its document: what is older is `<|endoftext|>`.
        """
        windows = self._windows(np.asarray(indices, np.int64), context_length)  # (N, K + 1)
        contexts = windows[:, :-1].astype(np.int64)  # (N, K)
        rows = np.flatnonzero((contexts == END_OF_TEXT).any(axis=1))
        newest_first = contexts[rows, ::-1]
        has_ended = np.logical_or.accumulate(newest_first == END_OF_TEXT, axis=1)
        newest_first[has_ended] = END_OF_TEXT
        contexts[rows] = newest_first[:, ::-1]
        return contexts, windows[:, -1].astype(np.int64)

    def _windows(self, indices: NDArray[np.int64], context_length: int) -> NDArray[Any]:
        """Return the tokens of each context and its target (N, K + 1)."""
        distances = indices - indices.min(initial=len(self))  # (N,)
        reach = max(_BLOCK, context_length)
        if self._file is None or distances.max(initial=0) <= reach:
            # Clipping repeats the first token, <|endoftext|>, before the start.
            positions = indices[:, None] + np.arange(1 - context_length, 2)  # (N, K + 1)
            windows = self.array.take(positions, mode="clip")
            self._release()
            return windows
        # A page of a mapped file, with up to 2 MB around it, counts as this process's memory once
        # it is touched, and to map it takes longer than to read a few tokens. So tokens far apart
        # are read. The first of all, whose contexts begin before the start, are no such tokens.
        is_far = distances > reach
        windows = np.empty((len(indices), context_length + 1), self.array.dtype)
        windows[~is_far] = self._windows(indices[~is_far], context_length)
        size = windows[0].nbytes
        places = (self._start + indices[is_far] + 1 - context_length) * windows.itemsize
        read = [os.pread(self._file.fileno(), size, place) for place in places.tolist()]
        windows[is_far] = np.frombuffer(b"".join(read), windows.dtype).reshape(-1, windows.shape[1])
        return windows

    def _release(self) -> None:
        """Give the pages of a mapped file back to the system, which keeps them while it can."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to validate with (perhaps none), and where they come from.

    `sha256` is that of the text: of its bytes where it is one file, else of the digests of its
    files, one after the other. `name` is `"fables"` for the embedded text, else `"external"`.
    """

    training: Tokens
    validation: Tokens
    tokenizer: ByteTokenizer
    sha256: str
    name: str


def load(
    text: Literal["fables"] | Sequence[str | Path],
    *,
    documents: Documents = "file",
    validation_fraction: float = 0.0,
    vocab_size: int = BYTE_VOCABULARY,
    tokenizer: ByteTokenizer | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Read `"fables"`, or files and folders by their paths (`"-"` is standard input).

    A folder stands for the regular files in it and below, hidden ones apart, in the order of
    their relative paths as bytes. A document is a file, a paragraph (a run of lines that are not
    blank) or a line. Line ends between documents belong to none; empty documents are dropped.

    About the last `validation_fraction` of the text is for validation: from the document boundary
    that is nearest, or, where there is one document alone, from the last character boundary
    before. A text too short to be divided leaves validation empty.

    Merges up to `vocab_size` are learned from the training part, unless a `tokenizer` is given.
    Tokens of a text above 64 MB are kept in a file, in `cache` (by default `$MINIGEN_CACHE`, else
    `~/.cache/minigen`); where `cache` is given, those of any text. `progress` is called on the way.

    Raises MinigenError where a file cannot be read or the text holds no document.
    """
    if text == "fables":
        sources = [_file(FABLES)]
    elif isinstance(text, str | bytes) or not text:
        raise OptionError(f'text must be "fables" or a list of paths (got {text!r})')
    else:
        sources = [source for path in text for source in _expand(path)]
    return _build(
        "fables" if text == "fables" else "external",
        _Text(sources, documents, progress),
        validation_fraction,
        vocab_size,
        tokenizer,
        cache,
    )


def from_memory(
    text: str | bytes | Sequence[str | bytes],
    *,
    documents: Documents = "file",
    validation_fraction: float = 0.0,
    vocab_size: int = BYTE_VOCABULARY,
    tokenizer: ByteTokenizer | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Do as `load` does with a text, or with a list of documents, which are not cut further."""
    if not isinstance(text, str | bytes):
        documents = "file"
    parts = [text] if isinstance(text, str | bytes) else text
    sources = [_memory("the text", characters(part).encode("latin-1")) for part in parts]
    return _build(
        "external",
        _Text(sources, documents, progress),
        validation_fraction,
        vocab_size,
        tokenizer,
        cache,
    )


def _build(
    name: str,
    text: "_Text",
    validation_fraction: float,
    vocab_size: int,
    tokenizer: ByteTokenizer | None,
    cache: Path | None,
) -> Corpus:
    if not 0 <= validation_fraction < 1:
        raise OptionError(
            f"validation_fraction must be from 0 to below 1 (got {validation_fraction})"
        )
    if cache is None and text.size > LARGE:
        cache = _default_cache()
    recipe = [text.sha256, text.documents, float(validation_fraction)]
    # The text is divided, and merges are learned and applied, where its bytes are its tokens.
    training, validation = _keep(
        ByteTokenizer(), cache, recipe, lambda file: _write_bytes(file, text, validation_fraction)
    )
    if tokenizer is None:
        tokenizer = _learn(training, vocab_size, cache, [*recipe, vocab_size], text.report)
    if tokenizer.merges:
        parts, merging = (training, validation), tokenizer
        training, validation = _keep(
            tokenizer,
            cache,
            [*recipe, tokenizer.state()],
            lambda file: _write_tokens(file, parts, merging, text.report),
        )
    return Corpus(training, validation, tokenizer, text.sha256, name)


# ---- From files to characters


@dataclass(frozen=True)
class _Source:
    """One file, or bytes, that can be read again and again."""

    name: str
    size: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes from the first on; raises MinigenError where they cannot be read."""
        try:
            with self.open() as file:
                file.seek(0)
                while block := file.read(_BLOCK):
                    yield block
        except OSError as error:
            raise _unreadable(self.name, error) from error


def _unreadable(name: str, error: Exception) -> MinigenError:
    """Return what to raise where the system cannot read something."""
    return MinigenError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}")


def _file(path: Path) -> _Source:
    """Return a file as a source; raises MinigenError if there is none."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unreadable(str(path), error) from error
    return _Source(str(path), size, lambda: path.open("rb", buffering=0))


def _memory(name: str, data: bytes) -> _Source:
    """Return bytes as a source."""
    return _Source(name, len(data), lambda: BytesIO(data))


def _spooled(name: str, stream: IO[bytes]) -> _Source:
    """Keep what can be read only once: in memory or, where it is large, in a temporary file."""
    spool = tempfile.SpooledTemporaryFile(LARGE)  # noqa: SIM115 (lives as long as the source)
    try:
        while block := stream.read(_BLOCK):
            spool.write(block)
    except OSError as error:
        raise _unreadable(name, error) from error
    source = _Source(name, spool.tell(), lambda: nullcontext(spool))
    weakref.finalize(source, spool.close)
    return source


def _expand(path: str | Path) -> list[_Source]:
    """Return the sources that a path stands for."""
    if str(path) == "-":
        return [_spooled("standard input", sys.stdin.buffer)]
    path = Path(path)
    try:
        if path.is_dir():
            files = sorted(_files(path), key=lambda file: os.fsencode(file.relative_to(path)))
            if not files:
                raise MinigenError(f"folder {path} has no files (hidden ones do not count)")
            return [_file(file) for file in files]
        if path.exists() and not path.is_file():
            with path.open("rb") as pipe:
                return [_spooled(str(path), pipe)]
    except OSError as error:
        raise _unreadable(error.filename or str(path), error) from error
    return [_file(path)]


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry))
            elif entry.is_file():
                yield Path(entry)


class _Text:
    """Sources as one string of characters, cut into documents."""

    def __init__(
        self, sources: list[_Source], documents: Documents, progress: Progress | None
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
        """Return the size in bytes and the SHA-256."""
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
        if len(digests) == 1:
            return size, digests[0].hexdigest()
        return size, hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()

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
        """Yield the text in blocks, with one `<|endoftext|>` or more between two documents."""
        edge = {"file": _END, "paragraph": "\n\n", "line": "\n"}[self.documents]
        done = 0
        for source in self._sources:
            held = edge
            for block in source.blocks():
                text = held + block.decode("latin-1")
                # What closes a document may go on in the next block (but is no megabyte long).
                body = text if self.documents == "file" else text.rstrip(" \t\r\n")
                body = body if len(text) - len(body) < _BLOCK else text
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


# ---- From characters to tokens


def _write_bytes(file: IO[bytes], text: "_Text", validation_fraction: float) -> int:
    """Write the text as tokens of the byte vocabulary; return how many are the training part's.

    Where the one document goes on in the validation part, `<|endoftext|>` is put in between.
    """
    total = ends = 0
    for block in text.characters():
        file.write(block.encode("utf-16-le"))
        total += len(block)
        if ends < 3:
            ends += block.count(_END)
    if total == 1:
        raise MinigenError(
            f"the text must hold a document (got {text.size} bytes, all of them line ends or "
            "blank lines)"
        )

    def read(start: int, stop: int) -> str:
        file.seek(2 * start)
        return file.read(2 * (stop - start)).decode("utf-16-le")

    if ends == 2:  # one document: cut before the last character that begins in time
        cut = total - 1 - round((total - 2) * validation_fraction)
        low = max(cut - 3, 1)
        near = enumerate(read(low, cut + 1), low)
        cut = max((at for at, byte in near if not "\x80" <= byte < "\xc0"), default=cut)
        if not 1 < cut < total - 1:
            return total
        for stop in range(total, cut, -_BLOCK):
            start = max(stop - _BLOCK, cut)
            moved = read(start, stop)
            file.seek(2 * (start + 1))
            file.write(moved.encode("utf-16-le"))
        file.seek(2 * cut)
        file.write(_END.encode("utf-16-le"))
        return cut + 1

    held_out = round((total - 1) * validation_fraction)
    if not held_out:
        return total
    ideal = max(total - 1 - held_out, 1)
    boundaries = []
    for stop in range(ideal, 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        if (at := read(start, stop).rfind(_END)) >= 0:
            boundaries.append(start + at)
            break
    for start in range(ideal, total, _BLOCK):
        if (at := read(start, min(start + _BLOCK, total)).find(_END)) >= 0:
            boundaries.append(start + at)
            break
    inner = (at for at in boundaries if 0 < at < total - 1)
    return 1 + min(inner, key=lambda at: abs(at - ideal))


def _learn(
    training: Tokens,
    vocab_size: int,
    cache: Path | None,
    recipe: list[Any],
    report: Progress,
) -> ByteTokenizer:
    """Learn merges from a training part of bytes, or find them in the cache."""
    if vocab_size <= BYTE_VOCABULARY:
        return ByteTokenizer.train([], vocab_size)
    path = cache and _cache_path(cache, recipe, "merges")
    if path:
        with suppress(OSError, ValueError, MinigenError):
            return ByteTokenizer.from_state(json.loads(path.read_bytes()))
    texts = _as_characters(training, partial(report, "learning merges"))
    tokenizer = ByteTokenizer.train_stream(_sample(texts, len(training)), vocab_size)
    if path:
        with _writing(path) as file:
            file.write(json.dumps(tokenizer.state()).encode())
    return tokenizer


def _as_characters(part: Tokens, report: Callable[[int, int], None]) -> Iterator[str]:
    done = 0
    for block in part.blocks():
        yield block.tobytes().decode("utf-16-le")
        done += len(block)
        report(done, len(part.array))


def _sample(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield about LEARN_FROM of the characters: lines chosen by what they say, so in any order."""
    if size <= LEARN_FROM:
        yield from texts
        return
    held = ""
    for text in chain(texts, [_END]):
        lines = _LINE.findall(held + text)
        held = lines.pop()
        yield "".join(line for line in lines if zlib.crc32(line.encode()) * size < LEARN_FROM << 32)


def _write_tokens(
    file: IO[bytes], parts: tuple[Tokens, Tokens], tokenizer: ByteTokenizer, report: Progress
) -> int:
    """Write two parts of bytes as tokens with merges; return how many are the first's."""
    sizes: list[int] = []
    for part, phase in zip(parts, ("encoding", "encoding validation"), strict=True):
        texts = _as_characters(part, partial(report, phase))
        if sizes:  # both parts hold the <|endoftext|> between them
            texts = (text[1:] if i == 0 else text for i, text in enumerate(texts))
        size = 0
        for tokens in tokenizer.encode_stream(texts):
            file.write(tokens.tobytes())
            size += len(tokens)
        sizes.append(size)
    return sizes[0]


def _keep(
    tokenizer: ByteTokenizer,
    cache: Path | None,
    recipe: list[Any],
    write: Callable[[IO[bytes]], int],
) -> tuple[Tokens, Tokens]:
    """Return both parts of what `write` writes, from memory or from a file of the cache."""
    if cache is None:
        memory = BytesIO()
        training_size = write(memory)
        array = np.frombuffer(memory.getbuffer(), tokenizer.dtype)
        return (
            Tokens(array[:training_size], tokenizer),
            Tokens(array[training_size - 1 :], tokenizer),
        )
    path = _cache_path(cache, recipe, "tokens")
    if not _is_whole(path):
        with _writing(path) as file:
            training_size = write(file)
            size = file.seek(0, os.SEEK_END)
            file.write(_FOOTER.pack(_MAGIC, training_size, size))
    try:
        opened = path.open("rb", buffering=0)
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _unreadable(str(path), error) from error
    _, training_size, size = _FOOTER.unpack(mapped[-_FOOTER.size :])
    weakref.finalize(mapped, opened.close)
    array = np.frombuffer(mapped, tokenizer.dtype, size // tokenizer.dtype.itemsize)
    return (
        Tokens(array[:training_size], tokenizer, opened, mapped),
        Tokens(array[training_size - 1 :], tokenizer, opened, mapped, start=training_size - 1),
    )


# ---- The cache


def _default_cache() -> Path:
    if named := os.environ.get("MINIGEN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minigen"


def _cache_path(folder: Path, recipe: list[Any], kind: str) -> Path:
    key = json.dumps([_MAGIC.decode(), *recipe]).encode()
    return folder / f"{hashlib.sha256(key).hexdigest()}.{kind}"


def _is_whole(path: Path) -> bool:
    """Tell whether there is a token file, of this format and of the size that its footer says."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - _FOOTER.size, 0))
            magic, _, size = _FOOTER.unpack(file.read())
    except (OSError, struct.error):
        return False
    return bool(magic == _MAGIC and end == size + _FOOTER.size)


@contextmanager
def _writing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file of the cache: a reader finds all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{_MACHINE}-{os.getpid()}-", suffix=".tmp", delete=False
        ) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise MinigenError(
            f"cannot keep tokens in {path.parent}: {error.strerror or error}; "
            "set MINIGEN_CACHE to a folder with room"
        ) from error


def _remove_stale(folder: Path) -> None:
    """Remove what builders on this machine left unfinished when they were killed."""
    for file in folder.glob(f"{glob.escape(_MACHINE)}-*-*.tmp"):
        with suppress(ValueError, OverflowError, PermissionError):
            try:
                os.kill(int(file.name.removeprefix(_MACHINE).split("-")[1]), 0)  # is it there?
            except ProcessLookupError:
                file.unlink(missing_ok=True)
