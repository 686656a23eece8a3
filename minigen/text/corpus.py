"""A corpus is a text as one flat array of tokens, a part to train on and a part to validate with.

Both parts open and end with ``<|endoftext|>``, and so does each document in them. Each token after
the first is one prediction.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import exact_sum
from minigen.text import token_cache
from minigen.text.documents import BLOCK, LARGE, Reader, Source, find, in_memory
from minigen.text.documents import Documents as Documents
from minigen.text.documents import Progress as Progress
from minigen.text.token_cache import TokenFile
from minigen.text.tokenizer import (
    BYTE_VOCABULARY,
    END_OF_TEXT,
    END_OF_TEXT_CHARACTER,
    ByteTokenizer,
    Text,
    Texts,
)

FABLES = Path(__file__).parents[1] / "corpora" / "fables.txt"
LEARN_FROM = 32 << 20
"""Merges are learned from about so many bytes of a text that has more."""

_END = END_OF_TEXT_CHARACTER
_LINE = re.compile(f"[^\n{_END}]{{1,4096}}[\n{_END}]?|[\n{_END}]")


class Tokens:
    """The predictions of an array of tokens (T + 1,) that opens and ends with ``<|endoftext|>``.

    Prediction i, from 0 to T - 1, has token i + 1 as its target and the tokens up to i as its
    context. ``array`` may be the part from ``start`` on of a token file, mapped into memory;
    ``read`` and ``blocks`` do not fill the memory with it.
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

    def __getstate__(self) -> dict[str, Any]:
        """Say of a part of a file which part it is; a copy, or a pickle, maps it again."""
        return vars(self) if self._file is None else {**vars(self), "array": len(self.array)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._file is not None:
            self.array = self._file.array[self._start : self._start + state["array"]]

    def part(self, start: int, stop: int) -> "Tokens":
        """Return the tokens from ``start`` to before ``stop``."""
        return Tokens(self.array[start:stop], self._tokenizer, self._file, self._start + start)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens from ``start`` to before ``stop``; of a file, only they are in memory."""
        if self._file is None:
            return self.array[start:stop]
        return self._file.read(self._start + start, self._start + stop)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all T + 1 tokens, some at a time."""
        for start in range(0, len(self.array), BLOCK):
            yield self.read(start, min(start + BLOCK, len(self.array)))

    @cached_property
    def bytes(self) -> int:
        """The number of bytes of text, ``<|endoftext|>`` not counted."""
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

        A context ends at the start of its document: what is older is ``<|endoftext|>``.
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
        # Clipping repeats the first token, <|endoftext|>, before the start.
        if self._file is None or not len(indices):
            return self.array.take(positions, mode="clip")
        low, high = max(int(positions.min()), 0), int(positions.max())
        if high - low <= BLOCK:
            return self.read(low, high + 1).take(positions - low, mode="clip")
        first = positions[0] < 0
        windows = self._file.windows(self._start + positions[0] * ~first, context_length + 1).T
        windows[:, first] = self.array.take(positions[:, first], mode="clip")
        return windows


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to validate with (perhaps none), and where they come from.

    ``sha256`` is that of the text: of its bytes where it is one file, else of the digests of its
    files, one after the other, with a hyphen and their number behind it. ``name`` is ``"fables"``
    for the embedded text, else ``"external"``.
    """

    training: Tokens
    validation: Tokens
    tokenizer: ByteTokenizer
    sha256: str
    name: str

    @property
    def files(self) -> int:
        """Of how many files, or documents of a list, the text was made."""
        return int(self.sha256.partition("-")[2] or 1)


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
    """Read ``"fables"``, or files and folders by their paths (``"-"`` is standard input).

    A folder stands for the regular files in it and below, hidden ones apart, in the order of
    their relative paths as bytes. A document is a file, a paragraph (a run of lines that are not
    blank) or a line. Line ends (LF, CR LF, CR CR LF, CR) between documents belong to none; empty
    documents are dropped, and so is a byte-order mark at the start of a file.

    About the last ``validation_fraction`` of the text is for validation: from the document boundary
    that is nearest, or, where there is one document alone, from the last character boundary
    before. A text too short to be divided leaves validation empty.

    Unless a ``tokenizer`` is given, merges are learned from the training part until there are
    ``vocab_size`` tokens or no pair is left. Tokens of a text above 64 MB are kept in a file, in
    ``cache`` (by default ``$MINIGEN_CACHE``, else ``~/.cache/minigen``); where ``cache`` is given,
    those of any text. ``progress`` is called on the way.

    Raises MinigenError where a file cannot be read or the text holds no document.
    """
    if not 0 <= validation_fraction < 1:
        raise OptionError(
            f"validation_fraction must be from 0 to below 1 (got {validation_fraction})"
        )
    if isinstance(text, Text) and text != "fables":
        raise OptionError(f'text must be "fables" or a list of paths (got {text!r})')
    name = "fables" if text == "fables" else "external"
    sources: list[Source] = []
    for path in [FABLES] if text == "fables" else text:
        sources += [path] if isinstance(path, Source) else find(path)
    reader = Reader(sources, documents, progress)
    if cache is None and reader.size > LARGE:
        cache = token_cache.default_folder()
    # The text is divided, and merges are learned and applied, where its bytes are its tokens.
    recipe: list[Any] = [reader.sha256, documents]
    byte_tokens = ByteTokenizer().encode_stream(reader.characters())
    whole = _keep(byte_tokens, ByteTokenizer(), cache, recipe)
    if not len(whole):
        raise MinigenError(
            f"the text must hold a document (got {reader.size} bytes, all of them line ends or "
            "blank lines)"
        )
    recipe.append(float(validation_fraction))
    parts = _divide(whole, validation_fraction, cache, recipe)
    if tokenizer is None:
        tokenizer = _learn(parts[0], vocab_size, cache, [*recipe, vocab_size], reader.report)
    if tokenizer.merges:
        for i, phase in enumerate(("encoding", "encoding validation")):
            tokens = tokenizer.encode_stream(_characters(parts[i], partial(reader.report, phase)))
            parts[i] = _keep(tokens, tokenizer, cache, [*recipe, tokenizer.state(), phase])
    training, validation = parts
    return Corpus(training, validation, tokenizer, reader.sha256, name)


def from_memory(text: Text | Texts, *, documents: Documents = "file", **options: Any) -> Corpus:
    """Do as ``load`` does, with its options; a list holds documents, not to be cut further."""
    if isinstance(text, Text):
        return load([in_memory(text)], documents=documents, **options)
    return load([in_memory(document) for document in text], documents="file", **options)


def _keep(
    blocks: Iterable[NDArray[Any]],
    tokenizer: ByteTokenizer,
    cache: Path | None,
    recipe: list[Any],
) -> Tokens:
    """Return tokens that come in blocks, in memory or in a file of the cache."""
    if cache is None:
        return Tokens(np.concatenate(list(blocks)), tokenizer)
    path = token_cache.path_of(cache, recipe, "tokens")
    file = token_cache.keep(path, tokenizer.dtype, blocks)
    return Tokens(file.array, tokenizer, file)


def _divide(
    whole: Tokens, validation_fraction: float, cache: Path | None, recipe: list[Any]
) -> list[Tokens]:
    """Return the training and the validation part of the tokens of bytes.

    The ``<|endoftext|>`` between two documents belongs to both parts.
    """
    cut = last = len(whole)
    if any((block == END_OF_TEXT).any() for block in whole.part(1, last).blocks()):
        held_out = round(last * validation_fraction)
        if held_out:
            cut = _nearest_end(whole, max(last - held_out, 1))
    else:  # one document: cut before the last character that begins in time
        ideal = last - round((last - 1) * validation_fraction)
        low = max(ideal - 3, 1)
        near = whole.read(low, ideal + 1)
        starts = np.flatnonzero((near < 0x80) | (near >= 0xC0))
        inside = low + int(starts[-1]) if len(starts) else ideal
        if 1 < inside < last:
            end = whole.read(0, 1)
            training = chain(whole.part(0, inside).blocks(), [end])
            validation = chain([end], whole.part(inside, last + 1).blocks())
            return [
                _keep(training, ByteTokenizer(), cache, [*recipe, "training"]),
                _keep(validation, ByteTokenizer(), cache, [*recipe, "validation"]),
            ]
    return [whole.part(0, cut + 1), whole.part(cut, last + 1)]


def _nearest_end(whole: Tokens, ideal: int) -> int:
    """Return the index of the ``<|endoftext|>`` inside that is nearest: there must be one."""
    last, reach = len(whole), 0
    while True:  # outwards
        before = max(ideal - reach - BLOCK, 1), max(ideal - reach, 1)
        after = min(ideal + reach, last), min(ideal + reach + BLOCK, last)
        found = [
            start + at
            for start, stop in (before, after)
            for at in np.flatnonzero(whole.read(start, stop) == END_OF_TEXT).tolist()
        ]
        if found:
            return min(found, key=lambda at: abs(at - ideal))
        reach += BLOCK


def _characters(part: Tokens, report: Callable[[int, int], None]) -> Iterator[str]:
    """Yield a part of bytes as characters."""
    done = 0
    for block in part.blocks():
        yield block.astype("<u2").tobytes().decode("utf-16-le")
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
        with suppress(MinigenError):
            return ByteTokenizer.from_state(json.loads(token_cache.read(path)))
    texts = _characters(training, partial(report, "learning merges"))
    tokenizer = ByteTokenizer.train_stream(_sample(texts, len(training)), vocab_size)
    if path:
        with token_cache.writing(path) as write:
            write(json.dumps(tokenizer.state()).encode())
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
