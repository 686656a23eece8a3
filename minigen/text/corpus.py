"""A corpus is a text as one flat array of tokens, a part to train on and a part to validate with.

Both parts open and end with ``<|endoftext|>``, and so does each document in them. Each token after
the first is one prediction.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from minigen.text.documents import (
    BLOCK,
    LARGE,
    Documents,
    Progress,
    Reader,
    Source,
    find,
    in_memory,
)
from minigen.text.token_cache import Kept, TokenFile
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
    context. They are the part from ``start`` to before ``stop`` of ``kept``: an array, or a token
    file, of which only what is asked for is in memory.
    """

    def __init__(
        self, kept: Kept, tokenizer: ByteTokenizer, start: int = 0, stop: int | None = None
    ) -> None:
        self._kept = kept
        self._tokenizer = tokenizer
        self._start = start
        self._stop = len(kept) if stop is None else stop

    @property
    def array(self) -> NDArray[Any]:
        """All T + 1 tokens."""
        return self._kept[self._start : self._stop]

    def __len__(self) -> int:
        return self._stop - self._start - 1

    def part(self, start: int, stop: int | None = None) -> "Tokens":
        """Return the tokens from ``start`` to before ``stop``, or to the last one."""
        stop = self._stop if stop is None else min(self._start + stop, self._stop)
        return Tokens(self._kept, self._tokenizer, self._start + start, stop)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all T + 1 tokens, some at a time."""
        for start in range(0, len(self) + 1, BLOCK):
            yield self.part(start, start + BLOCK).array

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
        if not isinstance(self._kept, TokenFile):
            return self.array.take(positions, mode="clip")
        low = max(int(positions.min(initial=len(self))), 0)
        high = int(positions.max(initial=low))
        if high - low <= max(BLOCK, context_length):
            return self.part(low, high + 1).array.take(positions - low, mode="clip")
        first = positions[0] < 0
        windows = self._kept.windows(self._start + positions[0] * ~first, context_length + 1).T
        opening = self.part(0, context_length).array
        windows[:, first] = opening.take(positions[:, first], mode="clip")
        return windows


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to validate with (perhaps none), and where they come from.

    ``sha256`` is that of the text, as a ``Reader`` tells it. ``name`` is ``"fables"`` for the
    embedded text, else ``"external"``.
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
    """Read ``"fables"``, or files and folders by their paths, as ``documents.find`` does.

    A document is a file, a paragraph (a run of lines that are not blank) or a line. Line ends (LF,
    CR LF, CR CR LF, CR) between documents belong to none; empty documents are dropped.

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
    keep = partial(token_cache.keep, cache, reader.sha256, documents)
    # The text is divided, and merges are learned and applied, where its bytes are its tokens.
    plain = ByteTokenizer()
    whole = Tokens(keep(blocks=plain.encode_stream(reader.characters())), plain)
    if not len(whole):
        raise MinigenError(
            f"the text must hold a document (got {reader.size} bytes, all of them line ends or "
            "blank lines)"
        )
    keep = partial(keep, float(validation_fraction))
    parts = _divide(whole, validation_fraction, keep)
    if tokenizer is None:
        tokenizer = _learn(parts[0], vocab_size, keep, reader.report)
    if tokenizer.merges:
        for i, phase in enumerate(("encoding", "encoding validation")):
            blocks = tokenizer.encode_stream(_characters(parts[i], partial(reader.report, phase)))
            kept = keep(tokenizer.state(), phase, blocks=blocks, dtype=tokenizer.dtype)
            parts[i] = Tokens(kept, tokenizer)
    training, validation = parts
    return Corpus(training, validation, tokenizer, reader.sha256, name)


def from_memory(text: Text | Texts, *, documents: Documents = "file", **options: Any) -> Corpus:
    """Do as ``load`` does, with its options; a list holds documents, not to be cut further."""
    if isinstance(text, Text):
        return load([in_memory(text)], documents=documents, **options)
    return load([in_memory(document) for document in text], documents="file", **options)


def _divide(whole: Tokens, validation_fraction: float, keep: Callable[..., Kept]) -> list[Tokens]:
    """Return the training and the validation part of the tokens of bytes.

    The ``<|endoftext|>`` between two documents belongs to both parts.
    """
    last = len(whole)
    held_out = round(last * validation_fraction)
    cut = _nearest_end(whole, max(last - held_out, 1))
    if cut is None:  # one document: cut before the last character that begins in time
        ideal = last - round((last - 1) * validation_fraction)
        low = max(ideal - 3, 1)
        near = whole.part(low, ideal + 1).array
        starts = np.flatnonzero((near < 0x80) | (near >= 0xC0))
        inside = low + int(starts[-1]) if len(starts) else ideal
        if 1 < inside < last:
            end = whole.part(0, 1).array
            training = chain(whole.part(0, inside).blocks(), [end])
            validation = chain([end], whole.part(inside).blocks())
            return [
                Tokens(keep("training", blocks=training), ByteTokenizer()),
                Tokens(keep("validation", blocks=validation), ByteTokenizer()),
            ]
    if cut is None or not held_out:
        cut = last
    return [whole.part(0, cut + 1), whole.part(cut)]


def _nearest_end(whole: Tokens, ideal: int) -> int | None:
    """Return the index of the ``<|endoftext|>`` inside that is nearest, of two the first."""
    nearest: list[int] = []  # of each block
    for i, block in enumerate(whole.blocks()):
        ends = i * BLOCK + np.flatnonzero(block == END_OF_TEXT)
        ends = ends[(ends > 0) & (ends < len(whole))]
        if len(ends):
            nearest.append(int(ends[np.abs(ends - ideal).argmin()]))
    return min(nearest, key=lambda end: abs(end - ideal), default=None)


def _characters(part: Tokens, report: Callable[[int, int], None]) -> Iterator[str]:
    """Yield a part of bytes as characters."""
    done = 0
    for block in part.blocks():
        yield block.astype("<u2").tobytes().decode("utf-16-le")
        done += len(block)
        report(done, len(part) + 1)


def _learn(
    training: Tokens, vocab_size: int, keep: Callable[..., Kept], report: Progress
) -> ByteTokenizer:
    """Learn merges from a training part of bytes, or find them in the cache."""
    if vocab_size <= BYTE_VOCABULARY:
        return ByteTokenizer.train([], vocab_size)

    def learned() -> Iterator[NDArray[Any]]:
        texts = _characters(training, partial(report, "learning merges"))
        tokenizer = ByteTokenizer.train_stream(_sample(texts, len(training)), vocab_size)
        yield np.array(tokenizer.merges, "<u4").ravel()

    kept = keep("merges", vocab_size, blocks=learned(), dtype=np.dtype("<u4"))
    pairs = Tokens(kept, ByteTokenizer()).array.reshape(-1, 2)
    return ByteTokenizer.from_state({"merges": pairs.tolist()})


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
