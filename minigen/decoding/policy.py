"""One decision: logits, the text so far, a policy and one random word become the next token.

Logit rules (penalties, bans) work on floats elementwise. Filters work on
``head.integer_weights``: what they compare and add up is exact, zero stays zero, and one token
always remains.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import lru_cache
from math import inf, isfinite, ldexp, sqrt, ulp
from numbers import Integral, Real
from typing import Any, Self, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minigen.decoding.history import History
from minigen.errors import MinigenError, OptionError, nearest
from minigen.exact.arithmetic import Floats, Integers, ceil_log2, exact_sum, integer_exp
from minigen.model import head
from minigen.text.tokenizer import END_OF_TEXT

Words = NDArray[np.uint64]


# ── Logit rules: (..., V) → (..., V) ─────────────────────────────────────────────────────────────


def add_bias(z: Floats, bias: Mapping[int, float]) -> Floats:
    """Add a constant to the logits of some tokens. Source: OpenAI API, ``logit_bias``."""
    z = z.copy()
    z[..., list(bias)] += list(bias.values())
    return z


def penalize_repetition(z: Floats, counts: Floats, penalty: float) -> Floats:
    """Divide positive logits of tokens that occurred by the penalty, multiply negative ones.

    Source: Keskar et al. 2019, "CTRL", section 4.1; the sign rule is the transformers library's.
    """
    return np.where(counts > 0, np.where(z < 0, z * penalty, z / penalty), z)


def penalize_frequency(z: Floats, counts: Floats, penalty: float) -> Floats:
    """Subtract the penalty once for every occurrence. Source: OpenAI API, ``frequency_penalty``."""
    return z - penalty * counts


def penalize_presence(z: Floats, counts: Floats, penalty: float) -> Floats:
    """Subtract the penalty once if the token occurred. Source: OpenAI API, ``presence_penalty``."""
    return z - penalty * (counts > 0)


def forbid(z: Floats, tokens: Any, rule: str) -> Floats:
    """Give tokens (a mask of z's shape, or ids of the last axis) the logit −inf.

    Source: Paulus et al. 2017, section 2.5, for n-grams. A rule that leaves nothing is an error.
    """
    z = z.copy()
    z[tokens if isinstance(tokens, np.ndarray) else (..., tokens)] = -np.inf
    if not np.isfinite(z.max(axis=-1)).all():
        raise MinigenError(f"{rule} leaves no token to choose from; loosen it or leave it out")
    return z


# ── Filters ──────────────────────────────────────────────────────────────────────────────────────
# They work on weights, all but the first two: on gaps (head.gaps: how far a logit lies below the
# best one, inf for never).

_FAR = 64.0  # nats: a token so far below the best has weight 0 in any vocabulary


@np.errstate(over="ignore")
def scale_temperature(gap: Floats, temperature: float) -> Floats:
    """Divide logits by the temperature. Source: Ackley et al. 1985, "Boltzmann machines".

    Tiny temperatures overflow to inf, never to NaN.
    """
    return gap / temperature


def top_k_weights(gap: Floats, k: int) -> Floats:
    """Weights of the k largest logits, and of those tied with the k-th. Source: Fan et al. 2018."""
    kth = np.partition(gap, k - 1, axis=-1)[..., k - 1, None]  # a value: ties cannot matter
    kept = gap <= kth
    w = np.zeros(gap.shape)
    w[kept] = integer_exp(gap[kept], head.weight_bits(gap.shape[-1]))  # of the few alone
    return w


@lru_cache
def decimal(number: float) -> Fraction:
    """Return the number as the decimal that was written: 0.1 is 1/10."""
    return Fraction(repr(float(number)))


def slack(S: Floats | Integers) -> Floats:
    """⌊S/2⁴⁰⌋: by how much a token may miss a threshold and still be kept.

    Logits are rounded logarithms, so p = 0.1 arrives as 0.1 ± 10⁻¹⁶: without slack a token that
    stands exactly at a threshold would go or stay by chance.
    """
    return np.floor(S * 2.0**-40)


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


def keep_top_p(w: Floats, p: float) -> Floats:
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


def keep_min_p(w: Floats, p: float) -> Floats:
    """Keep tokens at least p times as likely as the best one. Source: Nguyen et al. 2024."""
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
    logarithm is in the entropy too: their distance is that of gap and mean gap. Integers that
    hold a distance, as fine as there is room, and an id sort three times faster than ``argsort``.
    """
    id_bits = ceil_log2(w.shape[-1])
    mean = mean_gap(w, gap, exact_sum(w, axis=-1, keepdims=True))
    distance = np.where(w > 0, np.abs(gap - mean), _FAR) * ldexp(1.0, 56 - id_bits)  # below 2^62
    keys = np.rint(distance).astype(np.int64) << id_bits | np.arange(w.shape[-1])
    ordered = np.sort(keys, axis=-1)  # every key another: ties cannot matter
    ids = ordered & (1 << id_bits) - 1
    before = short_of(np.take_along_axis(w, ids, axis=-1), p)
    last = np.take_along_axis(ordered, before, axis=-1)
    return np.where(keys >> id_bits <= last >> id_bits, w, 0.0)


def keep_epsilon(w: Floats, epsilon: float) -> Floats:
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


# ── The draw ─────────────────────────────────────────────────────────────────────────────────────


def draw(w: Floats, words: Words) -> Integers:
    """Draw one token a row: the first whose cumulative weight exceeds ⌊word·S/2⁶⁴⌋.

    w (R, V) integer weights, words (R,); returns (R,). A weight of 0 is never drawn and the last
    token never overrun; each probability is within 2⁻⁶⁴ of w/S.
    """
    cumulative = running_sum(w)  # (R, V)
    totals = cumulative[:, -1].tolist()
    points = [word * S >> 64 for word, S in zip(words.tolist(), totals, strict=True)]
    drawn: Integers = (cumulative > np.array(points)[:, None]).argmax(axis=-1)
    return drawn


# ── The policy ───────────────────────────────────────────────────────────────────────────────────

_RANGES = {  # option: lowest, highest, rule, cure
    "temperature": (0.0, inf, "at least 0", "0 is greedy, 1 changes nothing"),
    "top_p": (0.0, 1.0, "between 0 and 1", "leave it out to switch it off"),
    "min_p": (0.0, 1.0, "between 0 and 1", "leave it out to switch it off"),
    "typical_p": (0.0, 1.0, "between 0 and 1", "leave it out to switch it off"),
    "epsilon_cutoff": (0.0, 1.0, "between 0 and 1", "leave it out to switch it off"),
    "eta_cutoff": (0.0, 1.0, "between 0 and 1", "leave it out to switch it off"),
    "repetition_penalty": (ulp(0.0), inf, "greater than 0", "1 is off"),
    "frequency_penalty": (-inf, inf, "finite", "0 is off"),
    "presence_penalty": (-inf, inf, "finite", "0 is off"),
}
SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
_COUNTS = ("top_k", "no_repeat_ngram_size", "min_new_tokens")


def _real(name: str, value: Any, lowest: float, highest: float, rule: str, cure: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
            if isfinite(number) and lowest <= number <= highest:
                return number
    raise OptionError(f"{name} must be a number, {rule} (got {value!r}); {cure}")


def _whole(name: str, value: Any, cure: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise OptionError(f"{name} must be a whole number, at least 0 (got {value!r}); {cure}")
    return int(value)


class PolicyOptions(TypedDict, total=False):
    """The options of a `Policy` as keywords of a function, for those who check types."""

    logit_bias: Mapping[int, float]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int | None
    suppress_tokens: Sequence[int]
    min_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the next token is chosen; the rules apply in the order of the fields.

    ``temperature=0``, ``top_k=1`` and ``top_p=0`` are greedy: the largest logit, of equals the
    lowest id, and no word is drawn. None, and ``top_k=0``, are off. Options out of range raise
    OptionError.

    >>> Policy(top_p=0.8).probabilities(np.log([0.3, 0.1, 0.1, 0.5])).round(3).tolist()
    [0.375, 0.0, 0.0, 0.625]
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    suppress_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {}
        for name, limits in _RANGES.items():
            if getattr(self, name) is not None:
                checked[name] = _real(name, getattr(self, name), *limits)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                checked[name] = _whole(name, getattr(self, name), "0 is off")
        named = "ids are those of `minigen next`"
        checked["suppress_tokens"] = tuple(
            _whole("a suppressed token's id", token, named)
            for token in (() if self.suppress_tokens is None else self.suppress_tokens)
        )
        checked["logit_bias"] = {
            _whole("a biased token's id", token, named): _real(
                "a logit bias", bias, -inf, inf, "finite", "to forbid a token, suppress it"
            )
            for token, bias in (self.logit_bias or {}).items()
        }
        for option in fields(self):  # None is off, which every default is
            object.__setattr__(self, option.name, checked.get(option.name, option.default))

    @classmethod
    def of(
        cls, policy: "Policy | None", options: PolicyOptions, others: Sequence[str] = ()
    ) -> Self:
        """Return the policy, or the one that the options make; OptionError where both are given.

        ``others`` are what else the caller takes: a misspelt option may have been meant for them.
        """
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                meant = nearest(name, [*known, *others])
                raise OptionError(f"unknown option {name!r}: the nearest known one is {meant}")
        if policy is None:
            return cls(**options)
        if not isinstance(policy, cls):
            raise OptionError(f"policy must be a Policy (got {policy!r})")
        if options:
            given = ", ".join(options)
            raise OptionError(f"give a policy or its options, not both (got policy and {given})")
        return policy

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, without a random word."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether a rule asks how often each token occurred."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)

    def adjust(self, logits: Floats, history: History) -> Floats:
        """Apply the logit rules. logits (R, V), a row for each text of the history → (R, V)."""
        z = logits
        if self.logit_bias:
            z = add_bias(z, self.logit_bias)
        if history.counts is not None:
            with np.errstate(over="ignore"):  # what overflows is refused by the head
                z = penalize_repetition(z, history.counts, self.repetition_penalty)
                z = penalize_frequency(z, history.counts, self.frequency_penalty)
                z = penalize_presence(z, history.counts, self.presence_penalty)
        if history.ngrams is not None:
            repeating = np.zeros(z.shape, dtype=bool)
            for mask, ngrams in zip(repeating, history.ngrams, strict=True):
                mask[ngrams.repeating()] = True
            z = forbid(z, repeating, f"no_repeat_ngram_size={self.no_repeat_ngram_size}")
        if self.suppress_tokens:
            z = forbid(z, list(self.suppress_tokens), "suppress_tokens")
        if history.new_tokens < self.min_new_tokens and z.shape[-1] > END_OF_TEXT:
            z = forbid(z, [END_OF_TEXT], f"min_new_tokens={self.min_new_tokens}")
        return z

    def weights(self, logits: Floats, history: History) -> Floats:
        """Apply every rule and filter: integer weights (R, V), p = w/Σw. Greedy gives one-hots."""
        z = self.adjust(logits, history)
        if self.greedy:
            w = np.zeros(z.shape)
            w[np.arange(len(z)), _best(z)] = 1.0
            return w
        gap = head.gaps(z)
        if self.temperature != 1:
            gap = scale_temperature(gap, self.temperature)
        if self.top_k and self.top_k < z.shape[-1]:
            w = top_k_weights(gap, self.top_k)
        else:
            w = integer_exp(gap, head.weight_bits(z.shape[-1]))
        if self.top_p is not None and self.top_p < 1:  # 1 is off; with slack it would cut the tail
            w = keep_top_p(w, self.top_p)
        if self.min_p:
            w = keep_min_p(w, self.min_p)
        if self.typical_p is not None and self.typical_p < 1:
            w = keep_typical_p(w, gap, self.typical_p)
        if self.epsilon_cutoff:
            w = keep_epsilon(w, self.epsilon_cutoff)
        if self.eta_cutoff:
            w = keep_eta(w, gap, self.eta_cutoff)
        return w

    def next_tokens(self, logits: Floats, history: History, words: Words | None) -> Integers:
        """Choose one token a row: logits (R, V), words (R,), None for greedy → ids (R,)."""
        if self.greedy:
            return _best(self.adjust(logits, history))
        assert words is not None
        return draw(self.weights(logits, history), words)

    def probabilities(
        self, logits: ArrayLike, history: Sequence[int] = (), *, prompt_length: int = 0
    ) -> Floats:
        """Probabilities after all rules and filters. logits (V,) or (R, V) → the same shape.

        ``history`` holds the ids of prompt and continuation so far, the same for all rows; its
        first ``prompt_length`` ids do not count as new tokens.
        """
        z = np.asarray(logits, dtype=np.float64)
        rows = np.atleast_2d(z)
        w = self.weights(rows, self._history(rows, history, prompt_length))
        p: Floats = w / exact_sum(w, axis=-1, keepdims=True)
        return p.reshape(z.shape)

    def choose(
        self,
        logits: ArrayLike,
        history: Sequence[int] = (),
        word: int = 0,
        *,
        prompt_length: int = 0,
    ) -> int:
        """Choose a token: logits (V,), one 64-bit word, which greedy ignores → its id."""
        rows = np.atleast_2d(np.asarray(logits, dtype=np.float64))
        words = np.array([word], dtype=np.uint64)
        return int(self.next_tokens(rows, self._history(rows, history, prompt_length), words)[0])

    def _history(self, rows: Floats, history: Sequence[int], prompt_length: int) -> History:
        for token in history:
            if not 0 <= token < rows.shape[-1]:
                last = rows.shape[-1] - 1
                raise OptionError(f"history takes ids from 0 to {last} (got {token})")
        new_tokens = max(0, len(history) - prompt_length)
        return self.history([history] * len(rows), rows.shape[-1], new_tokens)

    def history(
        self, texts: Sequence[Sequence[int]], vocab_size: int, new_tokens: int = 0
    ) -> History:
        """Return the history of R texts, as far as this policy asks for it.

        Raises MinigenError where the policy names a token that the vocabulary does not have.
        """
        self.check_ids(vocab_size)
        return History(
            texts,
            vocab_size,
            counts_tokens=self.counts_tokens,
            ngram_size=self.no_repeat_ngram_size,
            new_tokens=new_tokens,
        )

    def check_ids(self, vocab_size: int) -> None:
        """Refuse a policy that names ids which a vocabulary does not have."""
        for name in ("suppress_tokens", "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise MinigenError(
                        f"{name} takes ids below {vocab_size}, the size of this vocabulary "
                        f"(got {token})"
                    )


def _best(z: Floats) -> Integers:
    """Id of the largest logit, of equals the lowest. (R, V) → (R,)."""
    best: Integers = head.gaps(z).argmin(axis=-1)
    return best
