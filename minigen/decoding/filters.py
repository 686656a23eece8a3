"""Filters: which tokens a distribution keeps. What they compare and add up is exact.

The first ones work on gaps (``head.gaps``: how far a logit lies below the best one, inf for never),
all others on integer weights w (``head.integer_weights``), 0 for never; S is their sum. All are
(..., V). Each works on what the ones before it left, and leaves one token at least.
"""

from fractions import Fraction
from functools import lru_cache
from math import isqrt, sqrt

import numpy as np

from minigen.exact.arithmetic import Floats, Integers, ceil_log2, exact_sum, integer_exp
from minigen.model import head

_FAR = 64.0  # nats: a token so far below the best has weight 0 in any vocabulary
_SLACK = 2.0**-40
_FEW = 1 << 12  # numbers for which it is no use to look for those that a filter has left


@lru_cache
def decimal(number: float) -> Fraction:
    """Return the number as the decimal that was written: 0.1 is 1/10."""
    return Fraction(repr(float(number)))


def slack(S: Floats | Integers) -> Floats:
    """⌊S/2⁴⁰⌋: by how much a token may miss a threshold and still be kept.

    Logits are rounded logarithms, so p = 0.1 arrives as 0.1 ± 10⁻¹⁶: without slack a token that
    stands exactly at a threshold would go or stay by chance.
    """
    return np.floor(S * _SLACK)


def share(fraction: float, of: Floats | Integers) -> Floats:
    """⌈fraction·of⌉ of integers below 2⁵³, exact, elementwise."""
    part = decimal(fraction)
    shares = [-(-part.numerator * int(x) // part.denominator) for x in of.flat]
    return np.array(shares, dtype=np.float64).reshape(of.shape)


def running_sum(w: Floats) -> Integers:
    """Cumulative weights over the last axis; integers add up six times faster than floats."""
    return np.add.accumulate(w.astype(np.int64), axis=-1)


def short_of(w: Floats, p: float) -> Integers:
    """How many leading weights leave their sum short of a share p of all. (..., V) → (..., 1)."""
    cumulative = running_sum(w)
    S = cumulative[..., -1:]
    needed = (share(p, S) - slack(S)).astype(np.int64)
    count: Integers = exact_sum(cumulative < needed, axis=-1, keepdims=True)
    return count


# ── On gaps ──────────────────────────────────────────────────────────────────────────────────────


@np.errstate(over="ignore")
def scale_temperature(gap: Floats, temperature: float) -> Floats:
    """Divide logits by the temperature. Source: Ackley et al. 1985, "Boltzmann machines".

    Tiny temperatures overflow to inf, never to NaN.
    """
    return gap / temperature


def keep_top_n_sigma(gap: Floats, n: float) -> Floats:
    """Keep logits from the best one down to n standard deviations of all that are possible.

    Source: Tang et al. 2024, "Top-nσ: not all logits are you need". Gaps deviate as logits do. They
    are rounded to integers q of so many bits that Σq² stays within 2⁶²; then q ≤ n·σ is decided in
    Python integers, with the slack that the rounding of q and σ asks for.
    """
    bits = (62 - ceil_log2(gap.shape[-1])) // 2
    is_possible = gap < np.inf
    possible = np.where(is_possible, gap, 0.0)
    _, exponent = np.frexp(possible.max(axis=-1, keepdims=True))  # (..., 1)
    q = np.rint(np.ldexp(possible, bits - exponent)).astype(np.int64)  # (..., V)
    sums = [exact_sum(x, axis=-1).ravel().tolist() for x in (is_possible, q, q * q)]
    N, D = decimal(n).as_integer_ratio()
    reach = [
        isqrt(N * N * (count * squares - total * total)) // (D * count) + N // (2 * D) + 2
        for count, total, squares in zip(*sums, strict=True)
    ]
    # No gap is beyond 2^bits, however many deviations that is.
    limits = np.array([min(limit, 1 << bits) for limit in reach])
    return np.where(q <= limits.reshape(exponent.shape), gap, np.inf)


def keep_top_k(gap: Floats, k: int) -> Floats:
    """Keep the k largest logits, and those tied with the k-th. Source: Fan et al. 2018."""
    k = min(k, gap.shape[-1])
    # Numbers from +0 on are in the order of their bits, and integers are parted five times faster.
    bits = np.ascontiguousarray(gap).view(np.int64)
    kth = np.partition(bits, k - 1, axis=-1)[..., k - 1, None]  # a value: ties cannot matter
    return np.where(bits <= kth, gap, np.inf)


# ── On weights ───────────────────────────────────────────────────────────────────────────────────


def weights(gap: Floats) -> Floats:
    """rint(exp(−gap)·2^B): ``head.integer_weights`` of gaps."""
    bits = head.weight_bits(gap.shape[-1])
    if gap.size < _FEW:
        return integer_exp(gap, bits)
    near = np.flatnonzero(gap < _FAR)
    if 2 * len(near) > gap.size:
        return integer_exp(gap, bits)
    w = np.zeros(gap.shape)
    w.put(near, integer_exp(gap.take(near), bits))
    return w


def keep_top_p(w: Floats, gap: Floats, p: float) -> Floats:
    """Keep the smallest set of likeliest tokens with a mass of p; of equals, the lower ids.

    Source: Holtzman et al. 2019, "The curious case of neural text degeneration".
    """
    ordered = np.sort(w, axis=-1)[..., ::-1]  # values: ties cannot matter
    kept = short_of(ordered, p) + 1  # (..., 1)
    last = np.take_along_axis(ordered, kept - 1, axis=-1)
    tied = w == last
    room = kept - exact_sum(w > last, axis=-1, keepdims=True)  # for this many of the tied
    nth_tied = np.add.accumulate(tied, axis=-1, dtype=np.int64)
    return np.where((w > last) | (tied & (nth_tied <= room)), w, 0.0)


def _keep_from(w: Floats, threshold: Floats) -> Floats:
    """Keep weights from the threshold on, and the largest one in any case."""
    return np.where((w >= threshold) | (w == w.max(axis=-1, keepdims=True)), w, 0.0)


def keep_min_p(w: Floats, gap: Floats, p: float) -> Floats:
    """Keep tokens at least p times as likely as the best one. Source: Nguyen et al. 2024.

    The slack is that of every probability, 2⁻⁴⁰ of S: of the best weight it is up to V·2⁻⁴⁰.
    """
    S = exact_sum(w, axis=-1, keepdims=True)
    return _keep_from(w, share(p, w.max(axis=-1, keepdims=True)) - slack(S))


def mean_gap(w: Floats, gap: Floats, S: Floats) -> Floats:
    """Σ p·gap in nats, (..., 1): the entropy is this plus ln Σ exp(−gap).

    A term w·gap = 2^B·exp(−gap)·gap is at most 2^B/e, so the terms add up as integers.
    """
    terms = np.rint(w * np.minimum(gap, _FAR))
    mean: Floats = exact_sum(terms, axis=-1, keepdims=True) / S
    return mean


def keep_typical_p(w: Floats, gap: Floats, p: float) -> Floats:
    """Keep a mass of p of the tokens whose −ln p is nearest to the entropy, with all ties.

    Source: Meister et al. 2022, "Locally typical sampling". −ln p = gap + ln Σ exp(−gap), and the
    logarithm is in the entropy too: their distance is that of gap and mean gap. Distances that
    differ by 2⁻⁴⁰ nats or less are ties: they are rounded like every other number here.
    """
    mean = mean_gap(w, gap, exact_sum(w, axis=-1, keepdims=True))
    distance = np.where(w > 0, np.abs(gap - mean), np.inf)
    order = np.argsort(distance, kind="stable")
    before = short_of(np.take_along_axis(w, order, axis=-1), p)
    last = np.take_along_axis(distance, np.take_along_axis(order, before, axis=-1), axis=-1)
    return np.where(distance <= last + _SLACK, w, 0.0)


def keep_epsilon(w: Floats, gap: Floats, epsilon: float) -> Floats:
    """Keep tokens of probability ε or more, and the best. Source: Hewitt et al. 2022."""
    S = exact_sum(w, axis=-1, keepdims=True)
    return _keep_from(w, share(epsilon, S) - slack(S))


def keep_eta(w: Floats, gap: Floats, epsilon: float) -> Floats:
    """Keep tokens of probability min(ε, √ε·exp(−entropy)) or more, and the best.

    Source: Hewitt et al. 2022, "Truncation sampling as language model desmoothing". In weights,
    S·exp(−entropy) = 2^B·exp(−mean gap).
    """
    S = exact_sum(w, axis=-1, keepdims=True)
    typical = integer_exp(mean_gap(w, gap, S), head.weight_bits(w.shape[-1]))
    return _keep_from(w, np.minimum(epsilon * S, sqrt(epsilon) * typical) - slack(S))
