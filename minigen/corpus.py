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
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
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
"""Called with what is going on, the bytes done and the bytes in all."""

FABLES = Path(__file__).parent / "corpora" / "fables.txt"
LARGE = 64 << 20
"""A text of more bytes keeps its tokens in a file."""
LEARN_FROM = 32 << 20
"""Merges are learned from about so many bytes of a text that has more."""

_BLOCK = 1 << 20
_STRETCH = 64 << 20
_END = END_OF_TEXT_CHARACTER
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\r?\n)+")
_LINE = re.compile(f"[^\n{_END}]{{1,4096}}[\n{_END}]?|[\n{_END}]")
_MAGIC = b"minigen tokens 1"
_FOOTER = struct.Struct("<16sqq")  # the magic; tokens of the training part; tokens in all


class Tokens:
    """The predictions of a flat array of tokens (T + 1,) that opens and ends with `<|endoftext|>`.

    Prediction i, from 0 to T - 1, has token i + 1 as its target and the tokens up to i as its
    context.
    """

    def __init__(
        self, array: NDArray[Any], tokenizer: ByteTokenizer, file: mmap.mmap | None = None
    ) -> None:
        self.array = array
        self._tokenizer = tokenizer
        self._file = file

    def __len__(self) -> int:
        return len(self.array) - 1

    @cached_property
    def bytes(self) -> int:
        """The number of bytes of text, `<|endoftext|>` not counted."""
        vocab_size = self._tokenizer.vocab_size
        sizes = np.array([len(self._tokenizer.token_bytes(i)) for i in range(vocab_size)])  # (V,)
        total = 0
        for start in range(0, len(self.array), _BLOCK):
            counts = np.bincount(self.array[start : start + _BLOCK], minlength=vocab_size)  # (V,)
            total += int(exact_sum(counts * sizes))
            self._release()
        return total

    def contexts_and_targets(
        self, indices: NDArray[np.int64], context_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the contexts (N, K), oldest token first, and the targets (N,) of predictions.

        A context ends at the start of its document: what is older is `<|endoftext|>`.
        """
        windows = self._windows(np.asarray(indices), context_length)  # (N, K + 1)
        contexts = windows[:, :-1].astype(np.int64)  # (N, K)
        rows = np.flatnonzero((contexts == END_OF_TEXT).any(axis=1))
        newest_first = contexts[rows, ::-1]
        has_ended = np.logical_or.accumulate(newest_first == END_OF_TEXT, axis=1)
        newest_first[has_ended] = END_OF_TEXT
        contexts[rows] = newest_first[:, ::-1]
        return contexts, windows[:, -1].astype(np.int64)

    def _windows(self, indices: NDArray[np.int64], context_length: int) -> NDArray[Any]:
        """Return the tokens of each context and its target (N, K + 1)."""
        # Clipping repeats the first token, <|endoftext|>, before the start.
        positions = indices[:, None] + np.arange(1 - context_length, 2)  # (N, K + 1)
        if self._file is None:
            return self.array.take(positions, mode="clip")
        # A page once touched, with up to 2 MB around it, counts as this process's memory until
        # another needs it. So visit the file in order, and give the pages back on the way.
        order = np.argsort(indices, kind="stable")
        stretches = indices[order] * self.array.itemsize // _STRETCH
        windows = np.empty(positions.shape, self.array.dtype)
        for rows in np.split(order, np.flatnonzero(np.diff(stretches)) + 1):
            windows[rows] = self.array.take(positions[rows], mode="clip")
            self._release()
        return windows

    def _release(self) -> None:
        """Give the pages of the file back to the system, which reads them again where needed."""
        if self._file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED)


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
        _Text(sources, documents, validation_fraction, progress),
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
        _Text(sources, documents, validation_fraction, progress),
        vocab_size,
        tokenizer,
        cache,
    )


def _build(
    name: str, text: "_Text", vocab_size: int, tokenizer: ByteTokenizer | None, cache: Path | None
) -> Corpus:
    if cache is None and text.size > LARGE:
        cache = _default_cache()
    if tokenizer is None:
        tokenizer = _learn(text, vocab_size, cache)
    array, training_size, file = _tokens(text, tokenizer, cache)
    return Corpus(
        training=Tokens(array[:training_size], tokenizer, file),
        validation=Tokens(array[training_size - 1 :], tokenizer, file),
        tokenizer=tokenizer,
        sha256=text.sha256,
        name=name,
    )


# ---- From files to characters


@dataclass(frozen=True)
class _Source:
    """One file, or bytes, that can be read again and again."""

    name: str
    size: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]

    def blocks(self) -> Iterator[bytes]:
        try:
            with self.open() as file:
                file.seek(0)
                while block := file.read(_BLOCK):
                    yield block
        except OSError as error:
            raise _unreadable(self.name, error) from error


def _unreadable(name: str, error: Exception) -> MinigenError:
    return MinigenError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}")


def _file(path: Path) -> _Source:
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unreadable(str(path), error) from error
    return _Source(str(path), size, lambda: path.open("rb", buffering=0))


def _memory(name: str, data: bytes) -> _Source:
    return _Source(name, len(data), lambda: BytesIO(data))


def _spooled(name: str, stream: IO[bytes]) -> _Source:
    """Keep what can be read only once: in memory or, where it is large, in a temporary file."""
    spool = tempfile.SpooledTemporaryFile(LARGE)  # noqa: SIM115 (lives as long as the source)
    try:
        while block := stream.read(_BLOCK):
            spool.write(block)
    except OSError as error:
        raise _unreadable(name, error) from error
    return _Source(name, spool.tell(), lambda: nullcontext(spool))


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
    """Sources as one string of characters, cut into documents and into two parts."""

    def __init__(
        self,
        sources: list[_Source],
        documents: Documents,
        validation_fraction: float,
        progress: Progress | None,
    ) -> None:
        if documents not in ("file", "paragraph", "line"):
            raise OptionError(
                f'documents must be "file", "paragraph" or "line" (got {documents!r})'
            )
        if not 0 <= validation_fraction < 1:
            raise OptionError(
                f"validation_fraction must be from 0 to below 1 (got {validation_fraction})"
            )
        self._sources = sources
        self._documents = documents
        self._validation_fraction = float(validation_fraction)
        self._progress = progress
        self.size, self.sha256 = self._measure()
        if not self.size:
            names = ", ".join(source.name for source in sources[:3])
            raise MinigenError(
                f"the text is empty: {len(sources)} sources of 0 bytes ({names}); "
                "give at least one byte"
            )

    @property
    def recipe(self) -> list[Any]:
        """All that decides what `parts` gives."""
        return [self.sha256, self._documents, self._validation_fraction]

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
                self._report("hashing", size, expected)
            digests.append(digest)
        if len(digests) == 1:
            return size, digests[0].hexdigest()
        return size, hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(phase, done, total)

    def parts(self, phase: str) -> tuple[Iterator[str], Iterator[str]]:
        """Return the characters to train on and those to validate with, to be read in this order.

        The first open and close with `<|endoftext|>`, the second close with it if there are any.
        """
        cut, is_inside = self._cut
        texts = self._characters(phase)
        rest: list[str] = []

        def training() -> Iterator[str]:
            left = cut
            for text in texts:
                yield text[:left]
                rest[:] = [text[left:]]
                left -= min(left, len(text))
                if not left:
                    break
            if is_inside:
                yield _END

        def validation() -> Iterator[str]:
            yield from rest
            yield from texts

        return training(), validation()

    @cached_property
    def _cut(self) -> tuple[int, bool]:
        """The number of characters in the training part, and whether a document goes on there."""
        total = documents = 0
        for text in self._characters("splitting"):
            total += len(text)
            documents += text.count(_END)
        if total == 1:
            raise MinigenError(
                f"the text holds no document: its {self.size} bytes are blank lines; "
                "give at least one byte of text"
            )
        if documents == 2:
            cut = self._character_boundary(
                total - 1 - round((total - 2) * self._validation_fraction)
            )
            return (cut, True) if 1 < cut < total - 1 else (total, False)
        ideal = total - 1 - round((total - 1) * self._validation_fraction)
        if ideal == total - 1:
            return total, False
        boundaries: list[int] = []
        start = 0
        for text in self._characters("splitting"):
            near = max(ideal - start, 0)
            found = text.rfind(_END, 0, near), text.find(_END, near)
            boundaries += [start + at for at in found if at >= 0 and 0 < start + at < total - 1]
            start += len(text)
            if found[1] >= 0:
                break
        nearest = min(boundaries, key=lambda at: (abs(at - ideal), at))
        return nearest + 1, False

    def _character_boundary(self, at: int) -> int:
        """Return the last place up to `at` that is not inside a character of UTF-8."""
        low, start, near = max(at - 3, 1), 0, ""
        for text in self._characters("splitting"):
            near += text[max(low - start, 0) : max(at + 1 - start, 0)]
            start += len(text)
            if start > at:
                break
        places = [low + i for i, character in enumerate(near) if not "\x80" <= character < "\xc0"]
        return places[-1] if places else at

    def _characters(self, phase: str) -> Iterator[str]:
        """Yield the text in blocks: each document between two `<|endoftext|>`, none empty."""
        last = ""
        for text in self._marked(phase):
            while _END + _END in text:
                text = text.replace(_END + _END, _END)
            if last == _END:
                text = text.removeprefix(_END)
            if text:
                last = text[-1]
                yield text

    def _marked(self, phase: str) -> Iterator[str]:
        """Yield the text in blocks, with one `<|endoftext|>` or more between two documents."""
        edge = {"file": _END, "paragraph": "\n\n", "line": "\n"}[self._documents]
        done = 0
        for source in self._sources:
            held = edge
            for block in source.blocks():
                text = held + block.decode("latin-1")
                # What closes a document may go on in the next block (but is no megabyte long).
                body = text if self._documents == "file" else text.rstrip(" \t\r\n")
                body = body if len(text) - len(body) < _BLOCK else text
                held = text[len(body) :]
                yield self._mark(body)
                done += len(block)
                self._report(phase, done, self.size)
            yield self._mark(held + edge)
        if done != self.size:
            raise MinigenError(
                f"the text has changed while it was read: {self.size} bytes, then {done}"
            )

    def _mark(self, text: str) -> str:
        """Put `<|endoftext|>` in place of what stands between documents."""
        if self._documents == "line":
            text = text.replace("\n", _END)
        elif self._documents == "paragraph":
            text = _BLANK_LINES.sub(_END, text)
        return text.replace("\r" + _END, _END)


# ---- From characters to tokens


def _learn(text: _Text, vocab_size: int, cache: Path | None) -> ByteTokenizer:
    """Learn merges from the training part, or find those of the same text in the cache."""
    if vocab_size <= BYTE_VOCABULARY:
        return ByteTokenizer.train([], vocab_size)
    path = cache and _cache_path(cache, [*text.recipe, vocab_size], "merges")
    if path:
        with suppress(OSError, ValueError, MinigenError):
            return ByteTokenizer.from_state(json.loads(path.read_bytes()))
    training, _ = text.parts("learning merges")
    tokenizer = ByteTokenizer.train_stream(_sample(training, text.size), vocab_size)
    if path:
        _write(path, [json.dumps(tokenizer.state()).encode()])
    return tokenizer


def _sample(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield about LEARN_FROM of the characters: lines chosen by what they say, so in any order."""
    held = ""
    for text in chain(texts, [_END]):
        lines = _LINE.findall(held + text)
        held = lines.pop() if lines else ""
        yield "".join(
            line for line in lines if zlib.crc32(line.encode()) * size <= LEARN_FROM << 32
        )


def _encode(text: _Text, tokenizer: ByteTokenizer) -> Iterator[bytes]:
    """Yield the tokens of both parts, and at the end the footer that a token file closes with."""
    size, sizes = 0, []
    for part in text.parts("encoding"):
        for tokens in tokenizer.encode_stream(part):
            size += len(tokens)
            yield tokens.tobytes()
        sizes.append(size)
    yield _FOOTER.pack(_MAGIC, *sizes)


def _tokens(
    text: _Text, tokenizer: ByteTokenizer, cache: Path | None
) -> tuple[NDArray[Any], int, mmap.mmap | None]:
    """Return all tokens, how many of them are the training part's, and the file they are in."""
    file = None
    if cache is not None:
        path = _cache_path(cache, [*text.recipe, tokenizer.state()], "tokens")
        file = _mapped(path, tokenizer.dtype.itemsize)
        if file is None:
            _write(path, _encode(text, tokenizer))
            file = _mapped(path, tokenizer.dtype.itemsize)
            assert file is not None
    data = b"".join(_encode(text, tokenizer)) if file is None else file
    _, training_size, size = _FOOTER.unpack(data[-_FOOTER.size :])
    return np.frombuffer(data, tokenizer.dtype, size), training_size, file


# ---- The cache


def _default_cache() -> Path:
    if named := os.environ.get("MINIGEN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minigen"


def _cache_path(folder: Path, recipe: list[Any], kind: str) -> Path:
    key = json.dumps([_MAGIC.decode(), *recipe]).encode()
    return folder / f"{hashlib.sha256(key).hexdigest()}.{kind}"


def _mapped(path: Path, itemsize: int) -> mmap.mmap | None:
    """Map a token file into memory; None if there is none, or none that is whole."""
    try:
        with path.open("rb") as opened:
            file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # ValueError: an empty file
        return None
    except OSError as error:
        raise _unreadable(str(path), error) from error
    if len(file) < _FOOTER.size:
        return None
    magic, training_size, size = _FOOTER.unpack(file[-_FOOTER.size :])
    is_whole = magic == _MAGIC and len(file) == size * itemsize + _FOOTER.size
    return file if is_whole and 0 < training_size <= size else None


def _write(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file of the cache: a reader finds all of it or nothing."""
    builder = f"{platform.node()}-{os.getpid()}-"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=builder, suffix=".tmp", delete=False
        ) as file:
            try:
                for block in blocks:
                    file.write(block)
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
    for file in folder.glob(f"{glob.escape(platform.node())}-*-*.tmp"):
        builder = file.name.removeprefix(f"{platform.node()}-").partition("-")[0]
        try:
            os.kill(int(builder), 0)  # asks only whether it runs
        except ProcessLookupError:
            file.unlink(missing_ok=True)
        except (ValueError, OverflowError, PermissionError):
            continue
