"""The candidates of one decision: what may come next, how likely each is, and what greedy takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minigen.decoding.generation import LanguageModel, check_vocabulary, padded_contexts
from minigen.decoding.policy import SIZE, Policy
from minigen.decoding.scoring import entropy
from minigen.exact.arithmetic import exact_sum, log
from minigen.model import head
from minigen.text.tokenizer import ByteTokenizer, Text


@dataclass(frozen=True)
class Candidate:
    """A token that may come next: its logit is the model's, its probability the policy's.

    ``bytes`` are its own, none for ``<|endoftext|>``; ``negative_log_likelihood`` is in nats.
    """

    token_id: int
    bytes: bytes
    logit: float
    probability: float
    negative_log_likelihood: float

    @property
    def text(self) -> str:
        """The bytes as text; what is no character is U+FFFD."""
        return self.bytes.decode(errors="replace")


@dataclass(frozen=True)
class Decision:
    """What may follow a prompt, the likeliest first, of equals the lower id.

    ``entropy`` is in nats, over all tokens. ``others`` counts the tokens that are left and not
    among the candidates, and ``others_probability`` is theirs together.
    """

    candidates: list[Candidate]
    greedy_token_id: int
    entropy: float
    others: int
    others_probability: float


def decide(
    model: LanguageModel,
    tokenizer: ByteTokenizer,
    prompt: Text,
    policy: Policy | None = None,
    *,
    top: int = 10,
) -> Decision:
    """Show the ``top`` candidates to follow a prompt, after the rules and filters of a policy."""
    policy = policy or Policy()
    check_vocabulary(model, tokenizer)
    SIZE.check("top", top)
    history: Sequence[int] = tokenizer.encode(prompt).ids
    z = model.logits(padded_contexts([history], model.context_length))[0]  # (V,)
    p = policy.probabilities(z, history, prompt_length=len(history))  # (V,)
    best = replace(policy, temperature=0.0)
    is_plain = not policy.changes(z[None], policy.history([history], len(z)))
    # Weights of 0 have a finite log-probability in the model, but none behind a filter.
    nats = 0.0 - (head.log_softmax(z) if is_plain else log(p))
    ranking = np.argsort(-p, kind="stable")[:top].tolist()
    shown = [i for i in ranking if is_plain or p[i] > 0.0]
    others = np.delete(p, shown)
    return Decision(
        candidates=[
            Candidate(i, tokenizer.token_bytes(i), float(z[i]), float(p[i]), float(nats[i]))
            for i in shown
        ],
        greedy_token_id=best.choose(z, history, prompt_length=len(history)),
        entropy=entropy(p),
        others=int(np.count_nonzero(others)),
        others_probability=float(exact_sum(np.rint(others * 2.0**40))) * 2.0**-40,
    )
