"""How well a model predicts a text: log-probability, perplexity, bits per byte, calibration.

Sums of nats run over integers of 2⁻⁴⁸ nats, so that neither order nor blocks change a bit.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, ldexp

import numpy as np

from minigen.decoding.generation import (
    LanguageModel,
    check_vocabulary,
    log_probabilities,
    predictions,
    tokens_of,
)
from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import Floats, exact_sum, exp, integer_exp, log
from minigen.model import head
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import ByteTokenizer, Text

BINS = 15  # of the reliability table, as in Guo et al. 2017

_PER_NAT = 2.0**48
_LN2 = float(log(2.0))


def in_units(nats: Floats) -> int:
    """Sum of finite floats in units of 2⁻⁴⁸, each rounded once: exact in any order."""
    return sum(map(int, np.rint(nats * _PER_NAT).tolist()))


@dataclass(frozen=True)
class Score:
    """What a model says of one text, token by token and in all.

    ``log_probabilities`` and ``total_nats`` = −Σ log p in nats; ``probability`` = exp(−total);
    ``perplexity`` = exp(nats per token); ``bits_per_byte`` = total / (bytes·ln 2).
    """

    token_ids: list[int]
    log_probabilities: list[float]
    total_nats: float
    probability: float
    bytes: int
    perplexity: float
    bits_per_byte: float


def summarize(token_ids: list[int], log_probabilities: Floats, byte_count: int) -> Score:
    """Apply the chain rule: log p of a text is the sum of its tokens', (T,) in nats."""
    possible = bool(np.isfinite(log_probabilities).all())
    total = in_units(-log_probabilities) / _PER_NAT if possible else inf
    return Score(
        token_ids=token_ids,
        log_probabilities=log_probabilities.tolist(),
        total_nats=total,
        probability=float(exp(-total)),
        bytes=byte_count,
        perplexity=float(exp(total / len(token_ids))),
        bits_per_byte=total / (byte_count * _LN2),
    )


def score(model: LanguageModel, tokenizer: ByteTokenizer, text: Text) -> Score:
    """Score a text: each token given those before it, the first ones after a padded context.

    Only the text's own tokens count, no ``<|endoftext|>``. An empty text raises OptionError.
    """
    check_vocabulary(model, tokenizer)
    token_ids = list(tokenizer.encode(text).ids)
    if not token_ids:
        raise OptionError("a text to score must hold at least one byte (got 0 bytes)")
    log_p = np.concatenate([*log_probabilities(model, tokens_of(token_ids, tokenizer))])
    return summarize(token_ids, log_p, len(tokenizer.decode(token_ids)))


def _count(tokens: Tokens) -> int:
    """Return the number of predictions; raises MinigenError where there is none."""
    if not len(tokens):
        raise MinigenError("a text to evaluate must hold at least one token (got 0)")
    return len(tokens)


def mean_loss(model: LanguageModel, tokens: Tokens) -> float:
    """Mean −ln p of a text in nats per token. An empty one raises MinigenError."""
    n, total = _count(tokens), 0
    for log_p in log_probabilities(model, tokens):
        total -= in_units(log_p)
    return total / _PER_NAT / n


@dataclass(frozen=True)
class ReliabilityBin:
    """Predictions whose top probability lies in (lowest, highest].

    ``confidence`` is their mean top probability, ``accuracy`` how often the top token was right;
    both 0 where ``count`` is 0.
    """

    lowest: float
    highest: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Evaluation:
    """Loss of a model on a text, in nats per token, with baselines and calibration.

    ``baselines``: ``uniform`` is ln V; ``unigram`` and ``bigram`` are what counts of this very text
    would reach. ``calibration_error`` is the expected calibration error: over 15 bins of the top
    probability, the mean of |accuracy − confidence|. Source: Guo et al. 2017.
    """

    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int
    baselines: dict[str, float]
    calibration_error: float
    reliability: list[ReliabilityBin]


def evaluate(model: LanguageModel, tokens: Tokens) -> Evaluation:
    """Evaluate a model on a tokenized text, block by block. An empty one raises MinigenError."""
    V, n = model.vocab_size, _count(tokens)
    bits = head.weight_bits(V)
    nats = 0
    counts, hits, confidences = [0] * BINS, [0] * BINS, [0] * BINS
    for contexts, targets in predictions(model, tokens):
        gap = head.gaps(model.logits(contexts))  # (n, V)
        S = exact_sum(integer_exp(gap, bits), axis=1)  # (n,)
        missed = gap[np.arange(len(gap)), targets]  # (n,)
        nats += in_units(missed + head.log_partition(S, V))
        confidence = ldexp(1.0, bits) / S
        bins = np.minimum(np.ceil(confidence * BINS).astype(np.int64), BINS) - 1
        right = gap.argmin(axis=1) == targets
        for i in range(BINS):
            inside = bins == i
            counts[i] += int(exact_sum(inside))
            hits[i] += int(exact_sum(right & inside))
            confidences[i] += in_units(confidence[inside])
    loss = nats / _PER_NAT / n
    reliability = [
        ReliabilityBin(
            lowest=i / BINS,
            highest=(i + 1) / BINS,
            count=counts[i],
            confidence=confidences[i] / _PER_NAT / max(1, counts[i]),
            accuracy=hits[i] / max(1, counts[i]),
        )
        for i in range(BINS)
    ]
    error = sum(abs(hits[i] * int(_PER_NAT) - confidences[i]) for i in range(BINS))
    return Evaluation(
        loss=loss,
        bits_per_byte=nats / _PER_NAT / (tokens.bytes * _LN2) if tokens.bytes else inf,
        perplexity=float(exp(loss)),
        tokens=n,
        bytes=tokens.bytes,
        baselines=baselines(tokens, V),
        calibration_error=error / _PER_NAT / n,
        reliability=reliability,
    )


def baselines(tokens: Tokens, vocab_size: int) -> dict[str, float]:
    """Nats per token of the best distribution that knows nothing, counts, or counts of pairs.

    The counts are those of these very tokens.
    """
    before, after, pairs = Counter[int](), Counter[int](), Counter[int]()
    ids = np.array([], np.int64)
    for block in tokens.blocks():
        ids = np.concatenate([ids[-1:], block])
        found, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
        pairs.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    for pair, count in pairs.items():
        before[pair // vocab_size] += count
        after[pair % vocab_size] += count
    n = len(tokens)
    unigram = _count_log_count([n]) - _count_log_count(after.values())
    bigram = _count_log_count(before.values()) - _count_log_count(pairs.values())
    return {
        "uniform": float(log(float(vocab_size))),
        "unigram": unigram / _PER_NAT / n,
        "bigram": bigram / _PER_NAT / n,
    }


def _count_log_count(counts: Iterable[int]) -> int:
    """Σ c·ln c in units of 2⁻⁴⁸ nats."""
    c = np.array(list(counts), dtype=np.float64)
    return in_units(c * log(c))


def entropy(p: Floats) -> float:
    """−Σ p·ln p in nats of one distribution p (V,)."""
    p = np.where(p > 0.0, p, 1.0)  # 0·ln 0 counts as 0, and so does 1·ln 1
    return in_units(-p * log(p)) / _PER_NAT
