"""Speculative decoding: a draft model proposes tokens, the target accepts or replaces them.

What comes out is distributed exactly as if the target had been sampled token by token. Source:
Leviathan, Kalman and Matias 2023, "Fast inference from transformers via speculative decoding".
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate

import numpy as np

from minigen.decoding.generation import (
    LanguageModel,
    Piece,
    Row,
    Source,
    Task,
    check_vocabulary,
    no_stream,
    padded_contexts,
)
from minigen.decoding.policy import SIZE, DeadEndError, draw
from minigen.errors import MinigenError
from minigen.exact.arithmetic import Floats, exact_sum
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer, Text


class Choices:
    """The choices of a round, by the words of two sources: ``propose`` takes one's, else the other.

    A greedy policy's weights are one-hot: any word makes the same choice.
    """

    def __init__(self, draft: Callable[[], int], accept: Callable[[], int]):
        self._draft, self._accept = draft, accept

    def propose(self, weights: Floats) -> int:
        """Draw a token with these weights (V,), for the draft."""
        return int(draw(weights[None], np.array([self._draft()], dtype=np.uint64))[0])

    def accepts(self, numerator: int, denominator: int) -> bool:
        """Return True with probability min(1, numerator/denominator): u < numerator/denominator."""
        return self._accept() * denominator < numerator << 64

    def replace(self, weights: list[int]) -> int:
        """Draw a token as ``policy.draw`` does, from weights too large for floats."""
        cumulative = list(accumulate(weights))
        return bisect_right(cumulative, self._accept() * cumulative[-1] >> 64)


def acceptance(p: Floats, q: Floats, token: int) -> tuple[int, int]:
    """p(x)/q(x) as two integers, from the weights of target and draft (V,)."""
    return int(p[token]) * int(exact_sum(q)), int(q[token]) * int(exact_sum(p))


def residual(p: Floats, q: Floats) -> list[int]:
    """Weights of max(0, p − q), which a refused proposal is replaced from."""
    P, Q = int(exact_sum(p)), int(exact_sum(q))
    pairs = zip(_integers(p), _integers(q), strict=True)
    return [max(0, a * Q - b * P) for a, b in pairs]


def _integers(weights: Floats) -> list[int]:
    integers: list[int] = weights.astype(np.int64).tolist()
    return integers


def speculative_round(
    draft: Callable[[list[int]], Floats],
    target: Callable[[list[int]], Iterable[Floats]],
    choices: Choices,
    num_draft_tokens: int,
) -> Iterator[tuple[int, bool | None]]:
    """Propose, then verify: yield each new token, and whether it was proposed and accepted.

    ``draft`` gives the weights after some proposals, ``target`` its weights before each proposal
    and after the last; it is asked for no more than the tokens that are read here. One token more
    than was accepted comes out: where a proposal is refused its replacement (False), else one drawn
    from the target (None: nothing was examined). A draft in a dead end stops proposing.
    """
    proposals: list[int] = []
    q: list[Floats] = []
    with suppress(DeadEndError):
        while len(proposals) < num_draft_tokens and END_OF_TEXT not in proposals[-1:]:
            q.append(draft(proposals))
            proposals.append(choices.propose(q[-1]))
    for i, p in enumerate(target(proposals)):
        if i == len(proposals):
            yield choices.replace(_integers(p)), None
            return
        if choices.accepts(*acceptance(p, q[i], proposals[i])):
            yield proposals[i], True
        else:
            yield choices.replace(residual(p, q[i])), False
            return


def speculate(
    task: Task,
    draft: LanguageModel,
    draft_tokenizer: ByteTokenizer,
    prompts: Iterable[Text],
    streams: Callable[[int], tuple[Source, Source]] = no_stream,
    *,
    num_draft_tokens: int = 4,
) -> Iterator[Piece]:
    """Continue prompts one after the other; yield each token once it is certain.

    The policy shapes the distributions of both models. ``streams`` gives two to text i: one for
    proposals, one for acceptances and replacements; greedy asks for none. A text to which the
    policy leaves no token ends there, and a draft in that place stops proposing. A draft with
    another tokenizer raises MinigenError.
    """
    check_vocabulary(draft, draft_tokenizer)
    SIZE.check("num_draft_tokens", num_draft_tokens)
    if draft_tokenizer.state() != task.tokenizer.state():
        raise MinigenError(
            f"a draft must have the tokenizer of its target (got {draft_tokenizer.vocab_size} "
            f"tokens, other than the target's {task.tokenizer.vocab_size}); train both with one"
        )

    def choices(row: int) -> Choices:
        if task.policy.greedy:
            return Choices(lambda: 0, lambda: 0)
        return Choices(*(stream.word for stream in streams(row)))

    return (
        piece
        for i, prompt in enumerate(prompts)
        for piece in _speculate(task, draft, Row(task, i, prompt), choices(i), num_draft_tokens)
    )


def _speculate(
    task: Task, draft_model: LanguageModel, row: Row, choices: Choices, num_draft_tokens: int
) -> Iterator[Piece]:
    model, policy = task.model, task.policy
    history = policy.history([row.prompt_ids], model.vocab_size)
    window = max(model.context_length, draft_model.context_length)
    accepted = examined = 0
    row.facts["acceptance_rate"] = 0.0

    def draft(proposals: list[int]) -> Floats:
        if proposals:
            history.append(proposals[-1:])
        contexts = padded_contexts([recent + proposals[-window:]], draft_model.context_length)
        weights: Floats = policy.weights(draft_model.logits(contexts), history)[0]
        return weights

    def target(proposals: list[int]) -> Iterator[Floats]:
        written = len(row.token_ids)
        while history.new_tokens > written:  # the draft's tokens are not in the text yet
            history.pop([proposals[history.new_tokens - written - 1]])
        text, seen = recent + proposals, len(recent)
        texts = [text[max(0, n - window) : n] for n in range(seen, len(text) + 1)]
        logits = model.logits(padded_contexts(texts, model.context_length))  # (γ + 1, V)
        for i in range(len(texts)):
            yield policy.weights(logits[i : i + 1], history)[0]
            history.append(proposals[i : i + 1])  # it was accepted

    while True:
        room = task.max_new_tokens - len(row.token_ids)
        recent = [*row.prompt_ids[-window:], *row.token_ids[-window:]][-window:]
        try:
            for token, is_accepted in speculative_round(
                draft, target, choices, min(num_draft_tokens, room)
            ):
                accepted += is_accepted is True
                examined += is_accepted is not None
                row.facts["acceptance_rate"] = accepted / max(1, examined)
                yield row.push(token)
                if row.finish_reason:
                    return
        except DeadEndError as dead_end:
            yield row.give_up(dead_end)
            return
        history.append(row.token_ids[-1:])
