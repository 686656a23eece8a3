"""A policy: logits, the text so far and one random word become the next token.

Adding a rule or a filter takes one entry here, a field of ``Policy``: where it stands, it applies,
and the option of the command line, the config key, their help and checks follow from it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from inspect import getdoc
from math import inf, ulp
from numbers import Integral, Real
from sys import float_info
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minigen.arguments import checked, is_list
from minigen.decoding import filters, rules
from minigen.decoding.history import History
from minigen.errors import MinigenError, OptionError, listed, shown
from minigen.exact.arithmetic import Floats, Integers, exact_sum
from minigen.exact.streams import Words
from minigen.model import head
from minigen.text.tokenizer import require_tokens


class DeadEndError(MinigenError):
    """No token is left to go on with; the message names the rules that together left none."""


# ── The draw ─────────────────────────────────────────────────────────────────────────────────────


def draw(w: Floats, words: Words) -> Integers:
    """Draw one token a row: the first whose cumulative weight exceeds ⌊word·S/2⁶⁴⌋.

    w (R, V) integer weights, words (R,); returns (R,). A weight of 0 is never drawn and the last
    token never overrun; each probability is within 2⁻⁶⁴ of w/S.
    """
    cumulative = filters.running_sum(w)  # (R, V)
    totals = cumulative[:, -1].tolist()
    points = [word * S >> 64 for word, S in zip(words.tolist(), totals, strict=True)]
    drawn: Integers = (cumulative > np.array(points)[:, None]).argmax(axis=-1)
    return drawn


# ── What an option may be ────────────────────────────────────────────────────────────────────────


class Number(NamedTuple):
    """A number in a range; ``cure`` tells how to leave the option out.

    Here and below, ``rule`` completes "it must be …", and ``off`` is a value beside None and the
    default that switches an option off.
    """

    lowest: float
    highest: float
    rule: str
    cure: str = "leave it out to switch it off"
    off: float | None = None
    is_whole: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return the value as a float, or an int; raises OptionError."""
        kind: Any = Integral if self.is_whole else Real
        if isinstance(value, kind) and not isinstance(value, bool):
            with suppress(OverflowError):
                number = int(value) if self.is_whole else float(value)
                if self.lowest <= number <= self.highest:
                    return number
        raise OptionError(f"{name} must be {self.rule} (got {shown(value)}); {self.cure}")


_MOST = float_info.max
_COUNT = Number(0, inf, "a whole number, at least 0", "0 is off", off=0, is_whole=True)
PENALTY = Number(-_MOST, _MOST, "a number, finite", "0 is off")
SIZE = Number(1, inf, "a whole number, at least 1", "leave it out for the usual one", is_whole=True)
_CUTOFF = Number(0.0, 1.0, "a number, between 0 and 1")
_MASS = Number(0.0, 1.0, "a number, between 0 and 1", off=1)  # with its slack, 1 would cut the tail
_TOKEN = _COUNT._replace(cure="ids are those of `minigen next`")
_PROMPT = _COUNT._replace(cure="it counts the prompt's tokens")
_WORD = Number(
    0, 2**64 - 1, "a whole number, from 0 to below 2^64", "a Stream gives them", is_whole=True
)
_BIAS = Number(-_MOST, _MOST, "a number, finite", "to forbid a token, suppress it")


class Ids:
    """Token ids."""

    rule, off = "a list of token ids", None

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        """Return the ids as a tuple; raises OptionError."""
        if not is_list(value, Iterable):
            raise OptionError(f"{name} must be {self.rule} (got {shown(value)}); () is off")
        return tuple(_TOKEN.check("a suppressed token's id", token) for token in value)


class Biases:
    """A number for each of some token ids."""

    rule, off = "a table of token ids and numbers", None

    def check(self, name: str, value: Any) -> dict[int, float]:
        """Return {id: number}; raises OptionError."""
        if not isinstance(value, Mapping):
            raise OptionError(f"{name} must be {self.rule} (got {shown(value)}); {{}} is off")
        return {
            _TOKEN.check("a biased token's id", token): _BIAS.check("a logit bias", bias)
            for token, bias in value.items()
        }


@dataclass(frozen=True)
class Option:
    """All that is known of an option beside its name and place: see ``Policy``.

    ``function`` is a rule, (logits, history, value) → logits, or a filter, (gaps, value) → gaps or
    (weights, gaps, value) → weights; those on gaps apply before those on weights. ``help`` is its
    line of ``--help`` and its comment in ``fables.toml``, beside ``example``. A rule may say that
    it only ``forbids`` tokens, or ``counts``: it asks how often each one occurred.
    """

    works_on: Literal["logits", "gaps", "weights"]
    function: Callable[..., Floats]
    kind: Number | Ids | Biases
    example: Any
    help: str
    default: Any = None
    forbids: bool = False
    counts: bool = False

    @property
    def samples(self) -> bool:
        """Whether it shapes what is drawn, which a search with beams never asks for."""
        return self.works_on != "logits"


def _option(*entry: Any, **settings: Any) -> Any:
    option = Option(*entry, **settings)
    if isinstance(option.default, dict):
        return field(default_factory=dict, hash=False, metadata={"option": option})
    return field(default=option.default, metadata={"option": option})


_rule = partial(_option, "logits")
_gap_filter = partial(_option, "gaps")
_weight_filter = partial(_option, "weights")


_Step = tuple[str, Any, Option]  # an option that is switched on


class PolicyOptions(TypedDict, total=False):
    """The options of a ``Policy`` as keywords of a function, as type checkers see them."""

    logit_bias: Mapping[int, float]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int | None
    suppress_tokens: Sequence[int]
    min_new_tokens: int
    temperature: float
    top_n_sigma: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the next token is chosen; the options apply in the order of the fields.

    ``temperature=0``, ``top_k=1`` and ``top_p=0`` are greedy: the largest logit, of equals the
    lowest id, and no word is drawn. None, and ``top_k=0``, are off. Options out of range raise
    OptionError.

    >>> Policy(top_p=0.8).probabilities(np.log([0.3, 0.1, 0.1, 0.5])).round(3).tolist()
    [0.375, 0.0, 0.0, 0.625]
    """

    logit_bias: Mapping[int, float] = _rule(
        rules.add_bias,
        Biases(),
        {"65": 1.5},
        "Add a number to the logit of a token id.",
        default={},
    )
    repetition_penalty: float = _rule(
        rules.penalize_repetition,
        Number(ulp(0.0), _MOST, "a number, greater than 0", "1 is off"),
        1.1,
        "Divide logits of tokens that occurred, in the prompt too; below 0, multiply.",
        default=1.0,
        counts=True,
    )
    frequency_penalty: float = _rule(
        rules.penalize_frequency,
        PENALTY,
        0.1,
        "Subtract this for each occurrence, in the prompt too.",
        default=0.0,
        counts=True,
    )
    presence_penalty: float = _rule(
        rules.penalize_presence,
        PENALTY,
        0.1,
        "Subtract this once from tokens that occurred, in the prompt too.",
        default=0.0,
        counts=True,
    )
    no_repeat_ngram_size: int | None = _rule(
        rules.forbid_repeated_ngrams,
        _COUNT,
        8,
        "Never repeat N tokens in a row, of the prompt either.",
        forbids=True,
    )
    suppress_tokens: Sequence[int] = _rule(
        rules.suppress, Ids(), [0], "Never choose these token ids.", default=(), forbids=True
    )
    min_new_tokens: int = _rule(
        rules.delay_end_of_text,
        _COUNT,
        1,
        "Do not end the text, by a stop string either, before so many tokens.",
        default=0,
        forbids=True,
    )
    temperature: float = _gap_filter(
        filters.scale_temperature,
        Number(0.0, _MOST, "a number, at least 0", "0 is greedy, 1 changes nothing"),
        None,  # the config has a default of its own
        "Divide logits by this: below 1 the likely becomes likelier; 0 is greedy.",
        default=1.0,
    )
    top_n_sigma: float | None = _gap_filter(
        filters.keep_top_n_sigma,
        Number(ulp(0.0), _MOST, "a number, greater than 0"),
        1.5,
        "Keep logits within N standard deviations of the best.",
    )
    top_k: int | None = _gap_filter(filters.keep_top_k, _COUNT, 40, "Keep the K likeliest tokens.")
    top_p: float | None = _weight_filter(
        filters.keep_top_p, _MASS, 0.95, "Keep the likeliest tokens up to this probability."
    )
    min_p: float | None = _weight_filter(
        filters.keep_min_p, _CUTOFF, 0.05, "Keep tokens at least this times as likely as the best."
    )
    typical_p: float | None = _weight_filter(
        filters.keep_typical_p, _MASS, 0.95, "Keep the most typical tokens up to this probability."
    )
    epsilon_cutoff: float | None = _weight_filter(
        filters.keep_epsilon, _CUTOFF, 0.0003, "Keep tokens of at least this probability."
    )
    eta_cutoff: float | None = _weight_filter(
        filters.keep_eta, _CUTOFF, 0.0003, "Like epsilon, lowered where the distribution is flat."
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            # None is off, which every default is: a table of its own, for whoever writes into it.
            value = copy(option.default) if value is None else option.kind.check(name, value)
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.changed.items())
        return f"Policy({given})"

    @classmethod
    def of(cls, policy: "Policy | None", options: PolicyOptions) -> "Policy":
        """Return the policy, or the one that the options make; OptionError where both are given."""
        if policy is None:
            return cls(**options)
        if options:
            given = ", ".join(options)
            raise OptionError(f"give a policy or its options, not both (got policy and {given})")
        return policy

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not at their default, by name."""
        return {
            name: value
            for name, option in OPTIONS.items()
            if (value := getattr(self, name)) != option.default
        }

    @cached_property
    def _steps(self) -> dict[str, list[_Step]]:
        """The options that are switched on, in their order, by what they work on."""
        steps: dict[str, list[_Step]] = {"logits": [], "gaps": [], "weights": []}
        for name, value in self.changed.items():
            option = OPTIONS[name]
            if value != option.kind.off:
                steps[option.works_on].append((name, value, option))
        return steps

    @cached_property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, without a random word."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def adjust(self, logits: Floats, history: History) -> tuple[Floats, NDArray[np.bool_] | None]:
        """Apply the logit rules. logits (R, V), a row for each text of the history → (R, V), (R,).

        Also says which rows are dead ends, −inf throughout; None if none is. What a model itself
        has broken (NaN, inf, nothing but −inf) raises MinigenError.
        """
        if not self._steps["logits"]:
            return logits, None
        z = _apply(self._steps["logits"], logits, history)
        dead = ~np.isfinite(z.max(axis=-1))
        if not dead.any():
            return z, None
        head.gaps(logits[dead])  # raises
        return np.where(dead[:, None], -np.inf, z), dead

    def dead_end(self, logits: Floats, history: History, row: int) -> DeadEndError:
        """Say which rules left row ``row`` of the logits (R, V) no token."""
        logits, history = logits[row : row + 1], copy(history)
        history.select([row])
        needed = self._steps["logits"]
        for step in needed:
            fewer = [other for other in needed if other is not step]
            if not np.isfinite(_apply(fewer, logits, history).max()):
                needed = fewer
        names = []
        for name, value, option in needed:
            given = f"={shown(value)}" if isinstance(option.kind, Number) else ""
            names.append(f"{name}{given}{'' if option.forbids else ' (which overflows)'}")
        verb, one = ("together leave", "one") if len(names) > 1 else ("leaves", "it")
        return DeadEndError(
            f"{listed(names, 'and')} {verb} no token to choose from; loosen {one} or leave it out"
        )

    def weigh(self, z: Floats) -> Floats:
        """Apply the filters: adjusted logits (R, V) → integer weights, p = w/Σw.

        Greedy gives one-hots. Every row must have a token left.
        """
        if self.greedy:
            one_hot = np.zeros(z.shape)
            one_hot[np.arange(len(z)), _best(z)] = 1.0
            return one_hot
        return self._filter(head.gaps(z))[-1]

    def _filter(self, gap: Floats) -> tuple[Floats, Floats, Floats]:
        """Return gaps after the filters on gaps, their weights, and what is left of those."""
        for _, value, option in self._steps["gaps"]:
            gap = option.function(gap, value)
        w = whole = filters.weights(gap)
        for _, value, option in self._steps["weights"]:
            w = option.function(w, gap, value)
        return gap, whole, w

    def changes(self, logits: Floats, history: History) -> bool:
        """Whether these logits (R, V) lose a token, or a token gets another chance."""
        if self.greedy:
            return True
        z, _ = self.adjust(logits, history)
        gap, whole, w = self._filter(head.gaps(z))
        return not (np.array_equal(gap, head.gaps(logits)) and np.array_equal(w, whole))

    def pick(self, z: Floats, words: Callable[[], Words]) -> Integers:
        """Choose one token a row: adjusted logits (R, V) and, unless greedy, words (R,) → ids (R,).

        Every row must have a token left.
        """
        return _best(z) if self.greedy else draw(self.weigh(z), words())

    def weights(self, logits: Floats, history: History) -> Floats:
        """Apply every rule and filter: integer weights (R, V). Raises DeadEndError."""
        z, dead = self.adjust(logits, history)
        if dead is not None:
            raise self.dead_end(logits, history, int(dead.argmax()))
        return self.weigh(z)

    @checked
    def probabilities(
        self, logits: ArrayLike, history: Sequence[int] = (), *, prompt_length: int = 0
    ) -> Floats:
        """Probabilities after all rules and filters. logits (V,) or (R, V) → the same shape.

        ``history`` holds the ids of prompt and continuation so far, the same for all rows; its
        first ``prompt_length`` ids are not new tokens. Raises DeadEndError where none is left.
        """
        w = self._weights_after(logits, history, prompt_length)
        p: Floats = w / exact_sum(w, axis=-1, keepdims=True)
        return p.reshape(np.shape(logits))

    @checked
    def choose(
        self,
        logits: ArrayLike,
        history: Sequence[int] = (),
        word: int = 0,
        *,
        prompt_length: int = 0,
    ) -> int:
        """Choose a token: logits (V,), one 64-bit word, which greedy ignores → its id.

        Raises DeadEndError where no token is left.
        """
        word = _WORD.check("a word", word)
        w = self._weights_after(logits, history, prompt_length)
        if len(w) != 1:
            raise OptionError(f"logits must be those of one token, (V,) (got {w.shape})")
        return int(draw(w, np.array([word], dtype=np.uint64))[0])

    def _weights_after(
        self, logits: ArrayLike, history: Sequence[int], prompt_length: int
    ) -> Floats:
        """``weights`` of logits (V,) or (R, V), all with one history → (R, V)."""
        z = np.asarray(logits, dtype=np.float64)
        if z.ndim not in (1, 2):
            raise OptionError(f"logits must be (V,) or (R, V) (got shape {z.shape})")
        if not z.size:
            head.gaps(z)  # raises where there is no token
        rows, V = np.atleast_2d(z), z.shape[-1]
        self.check_ids(V)
        require_tokens(np.asarray(history), V)
        new_tokens = max(0, len(history) - _PROMPT.check("prompt_length", prompt_length))
        return self.weights(rows, self.history([history] * len(rows), V, new_tokens))

    def history(
        self, texts: Sequence[Sequence[int]], vocab_size: int, new_tokens: int = 0
    ) -> History:
        """Return the history of R texts, as far as this policy asks for it."""
        counts_tokens = any(option.counts for _, _, option in self._steps["logits"])
        return History(texts, vocab_size, counts_tokens, self.no_repeat_ngram_size, new_tokens)

    def check_ids(self, vocab_size: int) -> None:
        """Refuse a policy that names ids which a vocabulary does not have."""
        for name, option in OPTIONS.items():
            for token in getattr(self, name) if isinstance(option.kind, Ids | Biases) else ():
                if token >= vocab_size:
                    raise MinigenError(
                        f"{name} takes ids below {vocab_size}, the size of this vocabulary "
                        f"(got {shown(token)})"
                    )


Policy.__init__ = checked(Policy.__init__, types=False)  # type: ignore[method-assign]


def _best(z: Floats) -> Integers:
    """Id of the largest logit, of equals the lowest. (R, V) → (R,)."""
    best: Integers = head.gaps(z).argmin(axis=-1)
    return best


def _apply(steps: Sequence[_Step], z: Floats, history: History) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is a dead end
        for _, value, option in steps:
            z = option.function(z, history, value)
    return z


if not TYPE_CHECKING:  # else the list of options has one home, the Policy
    PolicyOptions = TypedDict(
        "PolicyOptions", {f.name: f.type for f in fields(Policy)}, total=False
    )
OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(Policy)}
"""Every option of a policy by its name, in the order in which they apply."""
_EXPLAINED = "".join(
    f"\n{name} = {option.default!r}: {option.help}" for name, option in OPTIONS.items()
)
Policy.__doc__ = f"{getdoc(Policy)}\n\nThe options, with their defaults:\n{_EXPLAINED}\n"
