"""A corpus is a text as one flat array of tokens, a part to train on and a part to validate with.

Both parts open and end with `<|endoftext|>`, and so does each document in them. Each token after
the first is one prediction.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from minigen import token_cache
from minigen.arithmetic import exact_sum
from minigen.errors import MinigenError, OptionError
from minigen.text import BLOCK, LARGE, Source, Text, find, in_memory
from minigen.text import Documents as Documents
from minigen.text import Progress as Progress
from minigen.token_cache import TokenFile
from minigen.tokenizer import BYTE_VOCABULARY, END_OF_TEXT, END_OF_TEXT_CHARACTER, ByteTokenizer

FABLES = Path(__file__).parent / "corpora" / "fables.txt"
LEARN_FROM = 32 << 20
"""Merges are learned from about so many bytes of a text that has more."""

_END = END_OF_TEXT_CHARACTER
_LINE = re.compile(f"[^\n{_END}]{{1,4096}}[\n{_END}]?|[\n{_END}]")


class Tokens:
    """The predictions of a flat array of tokens (T + 1,) that opens and ends with `<|endoftext|>`.

    Prediction i, from 0 to T - 1, has token i + 1 as its target and the tokens up to i as its
    context. `array` may be the part from `start` on of a token file, mapped into memory; `blocks`
    goes through it without filling the memory.
    """

    def __init__(
        self,
        array: NDArray[Any],
        tokenizer: ByteTokenizer,
        file: TokenFile | None = None,
        start: int = 0,
    ) -> None:
        self.array = array
        self._tokenizer = tokenizer
        self._file = file
        self._start = start

    def __len__(self) -> int:
        return len(self.array) - 1

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all T + 1 tokens, about a million at a time."""
        for start in range(0, len(self.array), BLOCK):
            yield self.array[start : start + BLOCK]
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
        windows = self._windows(np.asarray(indices, np.int64), context_length)  # (K + 1, N)
        has_ended = np.zeros(windows.shape[1], bool)  # (N,)
        for tokens in windows[-2::-1]:  # (N,), newest first
            has_ended |= tokens == END_OF_TEXT
            tokens[has_ended] = END_OF_TEXT
        return windows[:-1].T.astype(np.int64, order="C"), windows[-1].astype(np.int64)

    def _windows(self, indices: NDArray[np.int64], context_length: int) -> NDArray[Any]:
        """Return the tokens of each context and its target (K + 1, N)."""
        positions = indices + np.arange(1 - context_length, 2)[:, None]  # (K + 1, N)
        reach = indices.max(initial=0) - indices.min(initial=len(self))
        if self._file is None or reach <= BLOCK:
            # Clipping repeats the first token, <|endoftext|>, before the start.
            windows = self.array.take(positions, mode="clip")
            self._release()
            return windows
        first = positions[0] < 0
        windows = self._file.windows(self._start + positions[0] * ~first, context_length + 1).T
        windows[:, first] = self.array.take(positions[:, first], mode="clip")
        return windows

    def _release(self) -> None:
        if self._file is not None:
            self._file.release()


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
    text: Literal["fables"] | Sequence[str | Path | Source],
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

    Unless a `tokenizer` is given, merges are learned from the training part until there are
    `vocab_size` tokens or no pair is left. Tokens of a text above 64 MB are kept in a file, in
    `cache` (by default `$MINIGEN_CACHE`, else `~/.cache/minigen`); where `cache` is given, those
    of any text. `progress` is called on the way.

    Raises MinigenError where a file cannot be read or the text holds no document.
    """
    if not 0 <= validation_fraction < 1:
        raise OptionError(
            f"validation_fraction must be from 0 to below 1 (got {validation_fraction})"
        )
    if isinstance(text, str | bytes) and text != "fables":
        raise OptionError(f'text must be "fables" or a list of paths (got {text!r})')
    name = "fables" if text == "fables" else "external"
    paths = [FABLES] if text == "fables" else text
    sources = [
        source for path in paths for source in ([path] if isinstance(path, Source) else find(path))
    ]
    read = Text(sources, documents, progress)
    if cache is None and read.size > LARGE:
        cache = token_cache.default_folder()
    recipe = [read.sha256, documents, float(validation_fraction)]
    # The text is divided, and merges are learned and applied, where its bytes are its tokens.
    parts = _keep(
        ByteTokenizer(), cache, recipe, lambda file: _write_bytes(file, read, validation_fraction)
    )
    if tokenizer is None:
        tokenizer = _learn(parts[0], vocab_size, cache, [*recipe, vocab_size], read.report)
    if tokenizer.merges:
        write = partial(_write_tokens, parts=parts, tokenizer=tokenizer, report=read.report)
        parts = _keep(tokenizer, cache, [*recipe, tokenizer.state()], write)
    return Corpus(*parts, tokenizer, read.sha256, name)


def from_memory(
    text: str | bytes | Sequence[str | bytes], *, documents: Documents = "file", **options: Any
) -> Corpus:
    """Do as `load` does, with its options, with a text or a list of documents, not cut further."""
    if isinstance(text, str | bytes):
        return load([in_memory(text)], documents=documents, **options)
    return load([in_memory(document) for document in text], documents="file", **options)


def _keep(
    tokenizer: ByteTokenizer,
    cache: Path | None,
    recipe: list[Any],
    write: Callable[[IO[bytes]], int],
) -> tuple[Tokens, Tokens]:
    """Return both parts of what `write` writes, from memory or from a file of the cache."""
    file: TokenFile | None = None
    if cache is None:
        memory = BytesIO()
        size = write(memory)
        array: NDArray[Any] = np.frombuffer(memory.getbuffer(), tokenizer.dtype)
    else:
        file = token_cache.keep(
            token_cache.path_of(cache, recipe, "tokens"), tokenizer.dtype, write
        )
        array, size = file.array, file.training_size
    # The <|endoftext|> between the parts belongs to both.
    return (
        Tokens(array[:size], tokenizer, file),
        Tokens(array[size - 1 :], tokenizer, file, start=size - 1),
    )


def _write_bytes(file: IO[bytes], text: Text, validation_fraction: float) -> int:
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
        for stop in range(total, cut, -BLOCK):
            start = max(stop - BLOCK, cut)
            moved = read(start, stop)
            file.seek(2 * (start + 1))
            file.write(moved.encode("utf-16-le"))
        file.seek(2 * cut)
        file.write(_END.encode("utf-16-le"))
        return cut + 1

    held_out = round((total - 1) * validation_fraction)
    if not held_out:
        return total
    last = total - 1
    ideal = max(last - held_out, 1)
    reach = 0
    while True:  # outwards, to the nearest boundary
        low, high = max(ideal - reach - BLOCK, 1), min(ideal + reach, last)
        before = read(low, max(ideal - reach, 1)).rfind(_END)
        after = read(high, min(high + BLOCK, last)).find(_END)
        found = [low + before] * (before >= 0) + [high + after] * (after >= 0)
        if found:
            return 1 + min(found, key=lambda at: abs(at - ideal))
        reach += BLOCK


def _write_tokens(
    file: IO[bytes], parts: tuple[Tokens, Tokens], tokenizer: ByteTokenizer, report: Progress
) -> int:
    """Write two parts of bytes as tokens with merges; return how many are the first's."""
    sizes = [1]
    for part, phase in zip(parts, ("encoding", "encoding validation"), strict=True):
        file.seek((sizes[-1] - 1) * tokenizer.dtype.itemsize)  # both hold what is between them
        for tokens in tokenizer.encode_stream(_characters(part, partial(report, phase))):
            file.write(tokens.tobytes())
        sizes.append(file.tell() // tokenizer.dtype.itemsize)
    return sizes[1]


def _characters(part: Tokens, report: Callable[[int, int], None]) -> Iterator[str]:
    """Yield a part of bytes as characters."""
    done = 0
    for block in part.blocks():
        yield block.tobytes().decode("utf-16-le")
        done += len(block)
        report(done, len(part.array))


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
    path = cache and token_cache.path_of(cache, recipe, "merges")
    if path:
        with suppress(OSError, ValueError, MinigenError):
            return ByteTokenizer.from_state(json.loads(path.read_bytes()))
    texts = _characters(training, partial(report, "learning merges"))
    tokenizer = ByteTokenizer.train_stream(_sample(texts, len(training)), vocab_size)
    if path:
        with token_cache.writing(path) as file:
            file.write(json.dumps(tokenizer.state()).encode())
    return tokenizer


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
