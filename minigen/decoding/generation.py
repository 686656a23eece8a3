"""The loop: prompts, a policy and a stream each become texts, one token at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Literal, NamedTuple, Protocol

import numpy as np

from minigen.decoding.policy import Policy, Words
from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import Floats, Integers
from minigen.exact.streams import Stream
from minigen.model import head
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer, TextStream, characters

FinishReason = Literal["length", "stop", "end_of_text"]

_WORDS_AHEAD = 64  # drawn at once from each stream; a stream's position counts those used
_BLOCK = 1 << 16  # logits held at once where a whole text is scored


class LanguageModel(Protocol):
    """What generation asks of a model: contexts (N, K) → logits (N, V)."""

    vocab_size: int
    context_length: int

    def logits(self, contexts: Integers) -> Floats:
        """Return the logits of contexts (N, K) → (N, V)."""
        ...


@dataclass(frozen=True)
class Continuation:
    """A finished text: what followed the prompt, and why it ended.

    ``token_ids`` hold the ``<|endoftext|>`` and the stop string that ended it; ``text`` does not.
    ``log_probabilities`` (nats, one a token) are the model's, before penalties and filters; None
    unless asked for. ``acceptance_rate`` is that of speculation, ``score`` that of beams.
    """

    prompt: str | bytes
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    log_probabilities: list[float] | None = None
    acceptance_rate: float | None = None
    score: float | None = None


class Piece(NamedTuple):
    """One token of one text, and the text that it released; ``continuation`` with the last one."""

    row: int
    token_id: int
    text: str
    continuation: Continuation | None


class StopStrings:
    """Finds stop strings in bytes that arrive in parts, whatever the parts.

    A state is a tuple: of each stop string, how many bytes the text so far ends with. Source:
    Knuth, Morris and Pratt 1977; a byte costs the same however much was read before.
    """

    def __init__(self, stop: str | bytes | Sequence[str | bytes] = ()):
        strings = [stop] if isinstance(stop, str | bytes) else stop
        self.strings = [characters(string).encode("latin-1") for string in strings]
        if b"" in self.strings:
            raise OptionError("a stop string must not be empty (got ''); leave it out")
        self._borders = [_borders(string) for string in self.strings]
        self.start = (0,) * len(self.strings)

    def advance(self, state: tuple[int, ...], data: bytes) -> tuple[tuple[int, ...], int]:
        """Read more bytes; return the new state and how many bytes at the end to cut off.

        These are the stop string that is complete first (of several the longest) and what came
        after it; 0 if none is complete.
        """
        for i, byte in enumerate(data):
            state = tuple(
                _match(string, borders, matched, byte)
                for string, borders, matched in zip(self.strings, self._borders, state, strict=True)
            )
            complete = [n for n, s in zip(state, self.strings, strict=True) if n == len(s)]
            if complete:
                return state, max(complete) + len(data) - 1 - i
        return state, 0


def _match(string: bytes, borders: list[int], matched: int, byte: int) -> int:
    """Length of the longest start of the string that the text ends with after one more byte."""
    while matched and string[matched] != byte:
        matched = borders[matched - 1]
    return matched + (string[matched] == byte)


def _borders(string: bytes) -> list[int]:
    """Of each start of the string: the longest proper start of it that is also its end."""
    borders = [0]
    for byte in string[1:]:
        borders.append(_match(string, borders, borders[-1], byte))
    return borders


class TextWriter:
    """Turns the bytes of one continuation into text, as early as it is certain.

    Bytes that may still become a stop string, or part of a character, are held back; a character
    that stays incomplete comes out as U+FFFD at the end.
    """

    def __init__(self, stops: StopStrings):
        self._stops, self._state = stops, stops.start
        self._held = b""
        self._decoder = TextStream()

    def push(self, data: bytes) -> tuple[str, bool]:
        """Add bytes; return the text that is now certain, and whether a stop string ended it."""
        if not self._state:  # no stop strings
            return self._decoder.push(data), False
        self._held += data
        self._state, cut = self._stops.advance(self._state, data)
        certain = len(self._held) - (cut or max(self._state))
        text = self._decoder.push(self._held[:certain])
        self._held = self._held[certain:]
        return text, cut > 0

    def close(self, stopped: bool) -> str:
        """Return what was held back, without the stop string."""
        rest = "" if stopped else self._decoder.push(self._held)
        return rest + self._decoder.close()


class Row:
    """One text in the making."""

    def __init__(self, index: int, prompt: str | bytes, prompt_ids: list[int], stops: StopStrings):
        self.index, self.prompt, self.prompt_ids = index, prompt, prompt_ids
        self.token_ids: list[int] = []
        self._pieces: list[str] = []
        self._writer = TextWriter(stops)

    def push(self, token: int, data: bytes, full: bool) -> tuple[str, FinishReason | None]:
        """Add a token and its bytes; return the text released and, at the end, the reason.

        ``full``: the text may not grow any longer.
        """
        self.token_ids.append(token)
        text, stopped = self._writer.push(data)
        reason: FinishReason | None = None
        if token == END_OF_TEXT:
            reason = "end_of_text"
        elif stopped:
            reason = "stop"
        elif full:
            reason = "length"
        if reason:
            text += self._writer.close(stopped)
        self._pieces.append(text)
        return text, reason

    def finish(
        self, reason: FinishReason, scorer: LanguageModel | None, **figures: float
    ) -> Continuation:
        """Return the record of the finished text; ``scorer`` gives its log-probabilities."""
        log_p = None
        if scorer:
            whole = self.prompt_ids + self.token_ids
            log_p = token_log_probabilities(scorer, whole, len(self.prompt_ids)).tolist()
        text = "".join(self._pieces)
        return Continuation(self.prompt, text, self.token_ids, reason, log_p, **figures)


class WordSource:
    """The next word of each of several streams; draws ahead, but counts only what was used."""

    def __init__(self, streams: Sequence[Stream]):
        self._streams = list(streams)
        self._words = np.empty((len(streams), 0), dtype=np.uint64)
        self._used = 0

    def take(self) -> Words:
        """One word of each stream, (R,)."""
        if self._used == self._words.shape[1]:
            positions = [stream.position for stream in self._streams]
            self._words = np.stack([stream.words(_WORDS_AHEAD) for stream in self._streams])
            for stream, position in zip(self._streams, positions, strict=True):
                stream.position = position
            self._used = 0
        for stream in self._streams:
            stream.position += 1
        self._used += 1
        return self._words[:, self._used - 1]

    def keep(self, rows: list[int]) -> None:
        """Go on with these streams."""
        self._streams = [self._streams[row] for row in rows]
        self._words = self._words[rows]


def padded_contexts(texts: Sequence[Sequence[int]], context_length: int) -> Integers:
    """Return the last K tokens of each text, padded on the left with ``<|endoftext|>``. (R, K)."""
    padding = [END_OF_TEXT] * context_length
    rows = [[*padding, *text[-context_length:]][-context_length:] for text in texts]
    return np.array(rows, dtype=np.int64).reshape(len(texts), context_length)


def target_log_probabilities(model: LanguageModel, contexts: Integers, targets: Integers) -> Floats:
    """Log-probability in nats of each target after its context. (N, K), (N,) → (N,)."""
    result = np.empty(len(targets))
    height = max(1, _BLOCK // model.vocab_size)
    for start in range(0, len(targets), height):
        block = slice(start, start + height)
        log_p = head.log_softmax(model.logits(contexts[block]))  # (n, V)
        result[block] = np.take_along_axis(log_p, targets[block, None], axis=1)[:, 0]
    return result


def token_log_probabilities(model: LanguageModel, tokens: Sequence[int], start: int = 0) -> Floats:
    """Log-probability in nats of each token from ``start`` on, given those before it. (n,)."""
    K = model.context_length
    padded = np.array([END_OF_TEXT] * K + list(tokens), dtype=np.int64)
    contexts = np.lib.stride_tricks.sliding_window_view(padded, K)[start:-1]  # (n, K)
    return target_log_probabilities(model, contexts, padded[K + start :])


def check_vocabulary(model: LanguageModel, tokenizer: ByteTokenizer) -> None:
    """Refuse a model that is not the tokenizer's."""
    if model.vocab_size != tokenizer.vocab_size:
        raise MinigenError(
            f"model and tokenizer must have one vocabulary (got {model.vocab_size} and "
            f"{tokenizer.vocab_size} tokens); use the tokenizer of the model's checkpoint"
        )


def check_count(name: str, count: int) -> None:
    """Refuse what is not a whole number of at least 1."""
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise OptionError(f"{name} must be a whole number, at least 1 (got {count!r})")


def generate(
    model: LanguageModel,
    tokenizer: ByteTokenizer,
    prompts: Sequence[str | bytes],
    policy: Policy,
    streams: Sequence[Stream] | None = None,
    *,
    max_new_tokens: int = 200,
    stop: str | bytes | Sequence[str | bytes] = (),
    log_probabilities: bool = False,
) -> Iterator[Piece]:
    """Continue every prompt, all in one batch; yield each token as it is chosen, row by row.

    Each prompt has a stream of its own, which gives one word a token (greedy takes none, and needs
    no streams): a text does not depend on its neighbours. Only a prompt's last K tokens count; an
    empty one starts from a padded context. Errors: OptionError, MinigenError.
    """
    check_vocabulary(model, tokenizer)
    check_count("max_new_tokens", max_new_tokens)
    if not policy.greedy and (streams is None or len(streams) != len(prompts)):
        given = "none" if streams is None else len(streams)
        raise OptionError(f"each of {len(prompts)} prompts takes a stream of its own (got {given})")
    stops = StopStrings(stop)
    rows = [Row(i, prompt, tokenizer.encode(prompt).ids, stops) for i, prompt in enumerate(prompts)]
    words = None if policy.greedy else WordSource(streams or ())
    scorer = model if log_probabilities else None
    return _generate(model, tokenizer, rows, policy, words, max_new_tokens, scorer)


def _generate(
    model: LanguageModel,
    tokenizer: ByteTokenizer,
    rows: list[Row],
    policy: Policy,
    words: WordSource | None,
    max_new_tokens: int,
    scorer: LanguageModel | None,
) -> Iterator[Piece]:
    token_bytes = cache(tokenizer.token_bytes)
    prompts = [row.prompt_ids for row in rows]
    contexts = padded_contexts(prompts, model.context_length)  # (R, K)
    history = policy.history(prompts, model.vocab_size)
    while rows:
        drawn = words.take() if words else None
        tokens = policy.next_tokens(model.logits(contexts), history, drawn)
        contexts[:, :-1] = contexts[:, 1:]
        contexts[:, -1] = tokens
        chosen = tokens.tolist()
        history.append(chosen)
        full = history.new_tokens == max_new_tokens
        going_on = []
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            text, reason = row.push(token, token_bytes(token), full)
            if reason is None:
                going_on.append(i)
                yield Piece(row.index, token, text, None)
                continue
            yield Piece(row.index, token, text, row.finish(reason, scorer))
        if len(going_on) < len(rows):
            rows = [rows[i] for i in going_on]
            contexts = contexts[going_on]
            history.keep(going_on)
            if words:
                words.keep(going_on)


def complete(pieces: Iterator[Piece]) -> list[Continuation]:
    """Run a generation to its end; return the finished texts in the order of the prompts."""
    finished = {piece.row: piece.continuation for piece in pieces if piece.continuation}
    return [finished[row] for row in sorted(finished)]
