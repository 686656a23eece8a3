"""The loop: prompts, a policy and a stream each become texts, one token at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np

from minigen.decoding.policy import SIZE, DeadEndError, Policy
from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import Floats, Integers
from minigen.model import head
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer, Text, TextDecoder, Texts, to_bytes

FinishReason = Literal["length", "stop", "end_of_text", "dead_end"]

_BLOCK = 1 << 16  # logits held at once where a whole text is read
_MOST_ROWS, _MOST_LOGITS = 256, 1 << 20  # worked on at once, of however many prompts


class LanguageModel(Protocol):
    """What generation asks of a model: contexts (N, K) → logits (N, V)."""

    vocab_size: int
    context_length: int

    def logits(self, contexts: Integers) -> Floats:
        """Return the logits of contexts (N, K) → (N, V)."""


class Source(Protocol):
    """What generation asks of a stream: one random word after the other."""

    def word(self) -> int:
        """Return the next word, 0 ≤ word < 2⁶⁴."""


@dataclass(frozen=True)
class Continuation:
    """A finished text: what followed the prompt, and why it ended.

    ``token_ids`` hold the ``<|endoftext|>`` and the stop string that ended it; ``text`` does not.
    ``log_probabilities`` (nats, one a token) are the model's, before penalties and filters; None
    unless asked for. ``acceptance_rate`` is that of speculation (0 where nothing was proposed),
    ``score`` that of beams, ``explanation`` that of a dead end: which rules left no token.
    """

    prompt: Text
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    log_probabilities: list[float] | None = None
    acceptance_rate: float | None = None
    score: float | None = None
    explanation: str | None = None


class Piece(NamedTuple):
    """One token of one text, and the text that it released; ``continuation`` with the last one.

    ``token_id`` is None where a text ends without one more, in a dead end.
    """

    row: int
    token_id: int | None
    text: str
    continuation: Continuation | None


def find_stop(strings: list[bytes], held: bytes, data: bytes) -> tuple[int, int | None]:
    """Look for stop strings in bytes after those that were held back, as they may become one.

    Of both together, returns how many need not be held, and how many stand before the stop string
    that is now complete (of several the first, then the longest); None if none is.
    """
    text, found = held + data, []
    for string in strings:
        start = text.find(string, max(0, len(held) - len(string) + 1))
        if start >= 0:
            found.append((start + len(string), start))
    begun = max((_overlap(text, string) for string in strings), default=0)
    return len(text) - begun, min(found)[1] if found else None


def _overlap(text: bytes, string: bytes) -> int:
    """Length of the longest end of the text that is a start of the string, but not all of it."""
    starts = range(max(0, len(text) - len(string) + 1), len(text))
    return next((len(text) - i for i in starts if string.startswith(text[i:])), 0)


class Task:
    """What the texts of one call have in common: who writes them, how, and where they end.

    ``stop`` holds a string or several, before which a text ends; ``log_probabilities`` asks for
    those of its tokens. Raises OptionError or MinigenError where these do not go together.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: ByteTokenizer,
        policy: Policy | None = None,
        max_new_tokens: int = 200,
        stop: Text | Texts = (),
        log_probabilities: bool = False,
    ):
        self.model, self.tokenizer, self.policy = model, tokenizer, policy or Policy()
        self.max_new_tokens, self.log_probabilities = max_new_tokens, log_probabilities
        check_vocabulary(model, tokenizer)
        SIZE.check("max_new_tokens", max_new_tokens)
        self.policy.check_ids(model.vocab_size)
        self.token_bytes = cache(tokenizer.token_bytes)
        self.stops = [to_bytes(string) for string in ([stop] if isinstance(stop, Text) else stop)]
        if b"" in self.stops:
            raise OptionError("a stop string must not be empty (got ''); leave it out")


def stream_name(sample: int) -> str:
    """Return the name of the stream that sample i of each prompt draws from."""
    return f"inference/{sample}" if sample else "inference"


def no_stream(_row: int) -> NoReturn:
    """Stand for streams that are not given: a policy that is not greedy asks for them."""
    raise OptionError("a policy that draws takes streams for each text (got none)")


class Row:
    """One text of a task in the making. Nothing ends it before ``min_new_tokens``.

    Its bytes become text as early as that is certain: those that may still become a stop string, or
    part of a character, are held back; a character that stays incomplete comes out as U+FFFD at the
    end. One that began in the prompt is whole. ``finish_reason`` is None until the text ends;
    ``facts`` are what its ``Continuation`` is to say beside.
    """

    def __init__(
        self, task: Task, index: int, prompt: Text, streams: Callable[[int], Source] = no_stream
    ):
        self._task, self.index, self.prompt, self._streams = task, index, prompt, streams
        self.prompt_ids = task.tokenizer.encode(prompt).ids
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.facts: dict[str, Any] = {}
        self._texts: list[str] = []
        self._held, self._decoder = b"", TextDecoder()
        self._decoder.decode(to_bytes(prompt[-3:]))

    @cached_property
    def stream(self) -> Source:
        """The stream of its own, asked for at its first word."""
        return self._streams(self.index)

    def copy(self) -> "Row":
        """Return a text that goes on from here by itself."""
        twin = copy(self)
        twin.token_ids, twin._texts = self.token_ids.copy(), self._texts.copy()
        twin.facts, twin._decoder = self.facts.copy(), copy(self._decoder)
        return twin

    def push(self, token: int) -> Piece:
        """Add a token; return the piece, with the finished text where it ends."""
        text = self.add(token)
        return Piece(self.index, token, text, self.continuation() if self.finish_reason else None)

    def give_up(self, dead_end: DeadEndError) -> Piece:
        """End the text where no token is left; what was held back comes out."""
        self.finish_reason, self.facts["explanation"] = "dead_end", str(dead_end)
        self._texts.append(self._decoder.decode(self._held, final=True))
        return Piece(self.index, None, self._texts[-1], self.continuation())

    def add(self, token: int) -> str:
        """Add a token; return the text that is now certain: at the end, all that was held back."""
        task = self._task
        self.token_ids.append(token)
        data, held = task.token_bytes(token), b""
        reason: FinishReason | None = None
        if task.stops:  # without, nothing is ever held back
            certain, stop = find_stop(task.stops, self._held, data)
            data = self._held + data
            if stop is not None and len(self.token_ids) >= task.policy.min_new_tokens:
                certain, reason, data = stop, "stop", data[:stop]
            data, held = data[:certain], data[certain:]
        if reason is None:
            if token == END_OF_TEXT:
                reason = "end_of_text"
            elif len(self.token_ids) == task.max_new_tokens:
                reason = "length"
        self.finish_reason, self._held, decoder = reason, held, self._decoder
        is_plain = data.isascii() and not decoder.buffer  # mostly: the decoder takes longer
        text = data.decode() if is_plain else decoder.decode(data)
        if reason:
            text += decoder.decode(held, final=True)
        self._texts.append(text)
        return text

    def continuation(self) -> Continuation:
        """Return the record of the finished text."""
        assert self.finish_reason
        task, log_p, text = self._task, None, "".join(self._texts)
        if task.log_probabilities:
            whole = tokens_of(self.prompt_ids + self.token_ids, task.tokenizer)
            blocks = log_probabilities(task.model, whole, len(self.prompt_ids))
            log_p = [nats for block in blocks for nats in block.tolist()]
        return Continuation(
            self.prompt, text, self.token_ids, self.finish_reason, log_p, **self.facts
        )


def padded_contexts(texts: Sequence[Sequence[int]], context_length: int) -> Integers:
    """Return the last K tokens of each text, padded on the left with ``<|endoftext|>``. (R, K)."""
    padding = [END_OF_TEXT] * context_length
    rows = [[*padding, *text[-context_length:]][-context_length:] for text in texts]
    return np.array(rows, dtype=np.int64).reshape(len(texts), context_length)


def predictions(
    model: LanguageModel, tokens: Tokens, start: int = 0
) -> Iterator[tuple[Integers, Integers]]:
    """Yield contexts (n, K) and targets (n,) of the predictions from ``start`` on, in blocks."""
    height = max(1, _BLOCK // model.vocab_size)
    for first in range(start, len(tokens), height):
        indices = np.arange(first, min(first + height, len(tokens)))
        yield tokens.contexts_and_targets(indices, model.context_length)


def log_probabilities(model: LanguageModel, tokens: Tokens, start: int = 0) -> Iterator[Floats]:
    """Yield the log-probabilities (n,) in nats of the targets from ``start`` on, in blocks."""
    for contexts, targets in predictions(model, tokens, start):
        log_p = head.log_softmax(model.logits(contexts))  # (n, V)
        yield log_p[np.arange(len(targets)), targets]


def tokens_of(ids: Sequence[int], tokenizer: ByteTokenizer) -> Tokens:
    """Return the predictions of one text's ids; that it ends is none of them."""
    return Tokens(np.array([END_OF_TEXT, *ids], dtype=np.int64), tokenizer)


def check_vocabulary(model: LanguageModel, tokenizer: ByteTokenizer) -> None:
    """Refuse a model that is not the tokenizer's."""
    if model.vocab_size != tokenizer.vocab_size:
        raise MinigenError(
            f"model and tokenizer must have one vocabulary (got {model.vocab_size} and "
            f"{tokenizer.vocab_size} tokens); use the tokenizer of the model's checkpoint"
        )


def generate(
    task: Task,
    prompts: Iterable[Text],
    streams: Callable[[int], Source] = no_stream,
    *,
    one_by_one: bool = False,
) -> Iterator[Piece]:
    """Continue every prompt, a batch at a time; yield each token as it is chosen, row by row.

    ``streams`` gives the stream of text i, which gives one word a token (greedy takes none, and
    asks for no stream): a text does not depend on its neighbours, nor on the batch. Where texts
    share a stream they are made ``one_by_one``. Only a prompt's last K tokens count; an empty one
    starts from a padded context. A text to which the policy leaves no token ends there. Prompts are
    read as they are needed. Raises OptionError, MinigenError.
    """
    height = max(1, min(_MOST_ROWS, _MOST_LOGITS // task.model.vocab_size))
    rows = (Row(task, i, prompt, streams) for i, prompt in enumerate(prompts))
    while batch := list(islice(rows, 1 if one_by_one else height)):
        yield from _generate(task, batch)


def _generate(task: Task, rows: list[Row]) -> Iterator[Piece]:
    """Continue the texts of a batch, a row each; those that end leave it."""
    model, policy = task.model, task.policy
    prompts = [row.prompt_ids for row in rows]
    contexts = padded_contexts(prompts, model.context_length)  # (R, K)
    history = policy.history(prompts, model.vocab_size)

    def let_finished_go() -> None:
        nonlocal rows, contexts
        staying = [i for i, row in enumerate(rows) if row.finish_reason is None]
        if len(staying) != len(rows):
            rows, contexts = [rows[i] for i in staying], contexts[staying]
            history.select(staying)

    while rows:
        logits = model.logits(contexts)
        z, dead = policy.adjust(logits, history)
        if dead is not None:
            for i in np.flatnonzero(dead).tolist():
                yield rows[i].give_up(policy.dead_end(logits, history, i))
            let_finished_go()
            z = z[~dead]
            if not rows:
                return
        tokens = policy.pick(z, lambda: np.array([r.stream.word() for r in rows], np.uint64))
        contexts[:, :-1] = contexts[:, 1:]
        contexts[:, -1] = tokens
        chosen = tokens.tolist()
        history.append(chosen)
        for row, token in zip(rows, chosen, strict=True):
            yield row.push(token)
        let_finished_go()


def complete(pieces: Iterator[Piece]) -> list[Continuation]:
    """Run a generation to its end; return the finished texts in the order of the prompts."""
    finished = {piece.row: piece.continuation for piece in pieces if piece.continuation}
    return [finished[row] for row in sorted(finished)]
