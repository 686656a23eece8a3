"""Beam search keeps the B likeliest unfinished texts and looks for the best finished one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite

import numpy as np

from minigen.decoding.generation import (
    Continuation,
    LanguageModel,
    Row,
    StopStrings,
    check_count,
    check_vocabulary,
    padded_contexts,
)
from minigen.decoding.policy import SAMPLING_OPTIONS, Policy
from minigen.errors import OptionError
from minigen.exact.arithmetic import Floats, Integers, exp, log
from minigen.model import head
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer

SMALLEST = 2.0**-1022  # of the normal numbers


@dataclass(frozen=True)
class Beam:
    """New tokens of one text, the sum of their log-probabilities, and how stop strings match."""

    token_ids: tuple[int, ...]
    total: float
    state: tuple[int, ...]


def length_power(n: int, length_penalty: float) -> float:
    """n^α, exact for α = 0 and α = 1; never 0, so that a score may be divided by it."""
    if length_penalty in (0, 1):
        return float(n) if length_penalty else 1.0
    return max(float(exp(length_penalty * log(float(n)))), SMALLEST)


def best_first(scores: Floats, count: int) -> Integers:
    """Find the indices of the largest scores (n,), best first, of equals the lower; never −inf."""
    order = np.argsort(-scores, kind="stable")[:count]
    best: Integers = order[scores[order] > -np.inf]
    return best


def search(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    policy: Policy,
    *,
    num_beams: int,
    length_penalty: float,
    max_new_tokens: int,
    end_of_text: int = END_OF_TEXT,
    stops: StopStrings | None = None,
    token_bytes: Callable[[int], bytes] = lambda token: b"",
) -> list[tuple[float, tuple[int, ...]]]:
    """Return up to B finished texts as (score, new token ids), best first.

    Each step ranks the 2B best continuations of all beams. One that ends (end of text, stop string)
    is finished if it is among the B best; the B best others go on; at the last step the B best are
    finished as they are. score = Σ log p / n^α, n the new tokens with the end of text. Equal scores
    keep the order of beams, then of ids. The log-probabilities are the model's, changed by the
    policy's logit rules. It is the search of the transformers library without early stopping.
    """
    stops = stops or StopStrings()
    beams = [Beam((), 0.0, stops.start)]
    finished: list[tuple[float, tuple[int, ...]]] = []
    contexts = padded_contexts([prompt_ids], model.context_length)  # (B, K)
    history = policy.history([prompt_ids], model.vocab_size)
    for n in range(1, max_new_tokens + 1):
        log_p = policy.adjust(head.log_softmax(model.logits(contexts)), history)  # (B, V)
        totals = np.array([beam.total for beam in beams])[:, None] + log_p  # (B, V)
        going_on: list[Beam] = []
        parents: list[int] = []
        for rank, index in enumerate(best_first(totals.reshape(-1), 2 * num_beams).tolist()):
            parent, token = divmod(index, model.vocab_size)
            state, cut = stops.advance(beams[parent].state, token_bytes(token))
            beam = Beam((*beams[parent].token_ids, token), float(totals[parent, token]), state)
            if token == end_of_text or cut or n == max_new_tokens:
                if rank < num_beams:
                    score = beam.total / length_power(n, length_penalty)
                    finished.append((score, beam.token_ids))
            elif len(going_on) < num_beams:
                going_on.append(beam)
                parents.append(parent)
        finished = sorted(finished, key=lambda text: -text[0])[:num_beams]
        if not going_on:
            break
        beams = going_on
        tokens = [beam.token_ids[-1] for beam in beams]
        history.keep(parents)
        history.append(tokens)
        contexts = np.column_stack([contexts[parents][:, 1:], tokens])
    return finished


def beam_search(
    model: LanguageModel,
    tokenizer: ByteTokenizer,
    prompt: str | bytes,
    policy: Policy | None = None,
    *,
    num_beams: int,
    length_penalty: float = 1.0,
    max_new_tokens: int = 200,
    stop: str | bytes | Sequence[str | bytes] = (),
    log_probabilities: bool = False,
) -> list[Continuation]:
    """Return up to B continuations of a prompt, best first, each with its score.

    No random word is drawn: a policy that filters or scales raises OptionError.
    """
    policy = policy or Policy()
    for name in SAMPLING_OPTIONS:
        if getattr(policy, name) != getattr(Policy(), name):
            raise OptionError(
                f"beams take no sampling options (got {name}={getattr(policy, name)}); "
                f"leave it out, or search with num_beams=1"
            )
    check_count("num_beams", num_beams)
    if not isfinite(length_penalty):
        raise OptionError(f"length_penalty must be finite (got {length_penalty}); 0 is off")
    check_vocabulary(model, tokenizer)
    check_count("max_new_tokens", max_new_tokens)
    stops = StopStrings(stop)
    prompt_ids = tokenizer.encode(prompt).ids
    token_bytes = cache(tokenizer.token_bytes)
    found = search(
        model,
        prompt_ids,
        policy,
        num_beams=num_beams,
        length_penalty=length_penalty,
        max_new_tokens=max_new_tokens,
        stops=stops,
        token_bytes=token_bytes,
    )
    continuations = []
    for score, token_ids in found:
        row = Row(0, prompt, prompt_ids, stops)
        for token in token_ids:
            full = len(row.token_ids) + 1 == len(token_ids)
            _, reason = row.push(token, token_bytes(token), full)
        assert reason is not None
        scorer = model if log_probabilities else None
        continuations.append(row.finish(reason, scorer, score=score))
    return continuations
