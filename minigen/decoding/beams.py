"""Beam search keeps the B likeliest unfinished texts and looks for the best finished one."""

import numpy as np

from minigen.decoding.generation import Continuation, Row, Task, padded_contexts
from minigen.decoding.policy import OPTIONS, PENALTY, SIZE, DeadEndError
from minigen.errors import OptionError, shown
from minigen.exact.arithmetic import Floats, Integers, exp, log
from minigen.model import head
from minigen.text.tokenizer import Text


def length_power(n: int, length_penalty: float) -> float:
    """n^α, exact for α = 0 and α = 1; never 0, so that a score may be divided by it."""
    n = max(1, n)  # of a text that died at once
    if length_penalty == 1:
        return float(n)
    return max(float(exp(length_penalty * float(log(float(n))))), 2.0**-1022)


def best_first(scores: Floats, count: int) -> Integers:
    """Find the indices of the largest scores (n,), best first, of equals the lower.

    −inf is never found, and neither is a sum that a penalty has made overflow.
    """
    ranks = np.where(scores < np.inf, -scores, np.inf)
    last = min(count, len(ranks)) - 1
    # Those that can be among them: to sort all took longer than the rest of a step.
    found = np.flatnonzero((ranks < np.inf) & (ranks <= np.partition(ranks, last)[last]))
    best: Integers = found[np.argsort(ranks[found], kind="stable")[:count]]
    return best


def beam_search(
    task: Task, prompt: Text, *, num_beams: int, length_penalty: float = 1.0
) -> list[Continuation]:
    """Return up to B continuations of a prompt, best first, each with its score.

    Each step ranks the 2B best continuations of all beams. One that ends (end of text, stop string)
    is finished if it is among the B best; the B best others go on; at the last step the B best are
    finished as they are. score = Σ log p / n^α, n the new tokens with the end of text. Equal scores
    keep the order of beams, then of ids. The log-probabilities are the model's, changed by the
    policy's logit rules. It is the search of the transformers library with
    ``early_stopping="never"``, not with its default, a heuristic that may stop sooner.

    A beam to which the rules leave no token drops out. Where no text is finished and no beam left,
    the best of those is the result, as a dead end.

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
    model, policy = task.model, task.policy
    beams, totals = [Row(task, 0, prompt)], np.zeros(1)  # (B,) sums of log-probabilities
    finished: list[Row] = []
    stuck: list[Row] = []
    prompts = [beams[0].prompt_ids]
    contexts = padded_contexts(prompts, model.context_length)  # (B, K)
    history = policy.history(prompts, model.vocab_size)

    def scored(beam: Row, total: float) -> Row:
        beam.facts["score"] = float(total) / length_power(len(beam.token_ids), length_penalty)
        return beam

    def best(beams: list[Row], count: int) -> list[Row]:
        return sorted(beams, key=lambda beam: -beam.facts["score"])[:count]

    while True:
        own = head.log_softmax(model.logits(contexts))  # (B, V)
        log_p, dead = policy.adjust(own, history)
        if dead is not None and not finished:
            for i in np.flatnonzero(dead).tolist():
                stuck.append(scored(beams[i], totals[i]))
                beams[i].give_up(policy.dead_end(own, history, i))
        with np.errstate(over="ignore"):
            sums = totals[:, None] + log_p  # (B, V)
        going_on: list[Row] = []
        parents: list[int] = []
        for rank, index in enumerate(best_first(sums.ravel(), 2 * num_beams).tolist()):
            parent, token = divmod(index, model.vocab_size)
            beam = beams[parent].copy()
            beam.add(token)
            if beam.finish_reason:
                if rank < num_beams:
                    finished.append(scored(beam, sums[parent, token]))
            elif len(going_on) < num_beams:
                going_on.append(beam)
                parents.append(parent)
        finished = best(finished, num_beams)
        if not going_on:
            break
        beams, tokens = going_on, [beam.token_ids[-1] for beam in going_on]
        totals = sums[parents, tokens]
        history.select(parents)
        history.append(tokens)
        contexts = np.column_stack([contexts[parents][:, 1:], tokens])
    if not finished and not stuck:
        overflow = DeadEndError("the penalties add up beyond the largest float; make them smaller")
        for i, beam in enumerate(beams):
            stuck.append(scored(beam, totals[i]))
            beam.give_up(overflow)
    return [beam.continuation() for beam in finished or best(stuck, 1)]
