"""Beam search keeps the B likeliest unfinished texts and looks for the best finished one."""

from itertools import count
from typing import NamedTuple

import numpy as np

from minigen.decoding.generation import Continuation, Row, Task, padded_contexts
from minigen.decoding.policy import OPTIONS, PENALTY, SIZE, DeadEndError
from minigen.errors import OptionError, shown
from minigen.exact.arithmetic import Floats, Integers, exp, log
from minigen.model import head
from minigen.text.tokenizer import END_OF_TEXT, Text

SMALLEST = 2.0**-1022  # of the normal numbers


class Beam(NamedTuple):
    """New tokens of a text, the sum of their log-probabilities, what may become a stop string."""

    token_ids: tuple[int, ...]
    total: float
    held: bytes


class Found(NamedTuple):
    """One result of the search; ``dead_end`` where nothing could follow its tokens."""

    score: float
    token_ids: tuple[int, ...]
    dead_end: DeadEndError | None = None


def length_power(n: int, length_penalty: float) -> float:
    """n^α, exact for α = 0 and α = 1; never 0, so that a score may be divided by it."""
    n = max(1, n)  # of a text that died at once
    if length_penalty == 1:
        return float(n)
    return max(float(exp(length_penalty * log(float(n)))), SMALLEST)


def best_first(scores: Floats, count: int) -> Integers:
    """Find the indices of the largest scores (n,), best first, of equals the lower.

    −inf is never found, and neither is a sum that a penalty has made overflow.
    """
    scores = np.where(scores < np.inf, scores, -np.inf)
    order = np.argsort(-scores, kind="stable")[:count]
    best: Integers = order[scores[order] > -np.inf]
    return best


def search(task: Task, prompt: Text, num_beams: int, length_penalty: float) -> list[Found]:
    """Return up to B finished texts, best first.

    Each step ranks the 2B best continuations of all beams. One that ends (end of text, stop string)
    is finished if it is among the B best; the B best others go on; at the last step the B best are
    finished as they are. score = Σ log p / n^α, n the new tokens with the end of text. Equal scores
    keep the order of beams, then of ids. The log-probabilities are the model's, changed by the
    policy's logit rules. It is the search of the transformers library with
    ``early_stopping="never"``, not with its default, a heuristic that may stop sooner.

    A beam to which the rules leave no token drops out. Where no text is finished and no beam left,
    the best of those is the result, as a dead end.
    """
    model, policy = task.model, task.policy
    beams = [Beam((), 0.0, b"")]
    finished: list[Found] = []
    stuck: list[Found] = []
    prompts = [task.tokenizer.encode(prompt).ids]
    contexts = padded_contexts(prompts, model.context_length)  # (B, K)
    history = policy.history(prompts, model.vocab_size)

    def found(beam: Beam, dead_end: DeadEndError | None = None) -> Found:
        power = length_power(len(beam.token_ids), length_penalty)
        return Found(beam.total / power, beam.token_ids, dead_end)

    for n in count(1):
        own = head.log_softmax(model.logits(contexts))  # (B, V)
        log_p, dead = policy.adjust(own, history)
        if dead is not None and not finished:
            for i in np.flatnonzero(dead).tolist():
                stuck.append(found(beams[i], policy.dead_end(own, history, i)))
        with np.errstate(over="ignore"):
            totals = np.array([beam.total for beam in beams])[:, None] + log_p  # (B, V)
        going_on: list[Beam] = []
        parents: list[int] = []
        for rank, index in enumerate(best_first(totals.ravel(), 2 * num_beams).tolist()):
            parent, token = divmod(index, model.vocab_size)
            token_ids, _, held = beams[parent]
            data = task.token_bytes(token)
            certain, stop = task.stops.read(held, data)
            total = float(totals[parent, token])
            beam = Beam((*token_ids, token), total, (held + data)[certain:])
            stopped = stop is not None and n >= policy.min_new_tokens
            if token == END_OF_TEXT or stopped or n == task.max_new_tokens:
                if rank < num_beams:
                    finished.append(found(beam))
            elif len(going_on) < num_beams:
                going_on.append(beam)
                parents.append(parent)
        finished = sorted(finished, key=lambda text: -text.score)[:num_beams]
        if not going_on:
            break
        beams = going_on
        tokens = [beam.token_ids[-1] for beam in beams]
        history.select(parents)
        history.append(tokens)
        contexts = np.column_stack([contexts[parents][:, 1:], tokens])
    if not finished and not stuck:
        overflow = DeadEndError("the penalties add up beyond the largest float; make them smaller")
        stuck = [found(beam, overflow) for beam in beams]
    return finished or sorted(stuck, key=lambda text: -text.score)[:1]


def beam_search(
    task: Task, prompt: Text, *, num_beams: int, length_penalty: float = 1.0
) -> list[Continuation]:
    """Return up to B continuations of a prompt, best first, each with its score.

    No random word is drawn: a policy that filters or scales raises OptionError.
    """
    for name, value in task.policy.changed.items():
        if OPTIONS[name].samples:
            raise OptionError(
                f"beams take no sampling options (got {name}={shown(value)}); "
                f"leave it out, or search with num_beams=1"
            )
    SIZE.check("num_beams", num_beams)
    length_penalty = PENALTY.check("length_penalty", length_penalty)
    continuations = []
    for score, token_ids, dead_end in search(task, prompt, num_beams, length_penalty):
        row = Row(task, 0, prompt)
        pieces = [row.push(token, score=score) for token in token_ids]
        if dead_end:
            pieces.append(row.give_up(dead_end, score=score))
        continuation = pieces[-1].continuation
        assert continuation
        continuations.append(continuation)
    return continuations
