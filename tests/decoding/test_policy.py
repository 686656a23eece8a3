"""A policy turns logits into the distribution of the references, and draws from it exactly."""

import json
import re
from fractions import Fraction
from pathlib import Path
from sys import float_info

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minigen.decoding import filters
from minigen.decoding.filters import (
    keep_top_k,
    keep_top_n_sigma,
    keep_top_p,
    keep_typical_p,
    mean_gap,
    share,
)
from minigen.decoding.policy import OPTIONS, DeadEndError, Policy, draw
from minigen.errors import MinigenError, OptionError
from minigen.exact.streams import Stream
from minigen.model import head

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "decoding.json").read_text())
LARGEST_WORD = 2**64 - 1


@pytest.mark.parametrize("case", VECTORS["policies"], ids=lambda case: case["name"])
def test_a_policy_gives_what_the_transformers_processors_give(case):
    got = Policy(**case["policy"]).probabilities(case["logits"], case["history"])
    assert got == pytest.approx(case["probabilities"], abs=VECTORS["tolerance"])
    assert np.array_equal(got > 0, np.array(case["probabilities"]) > 0)


def kept(policy, probabilities):
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    return np.flatnonzero(policy.probabilities(logits)).tolist()


def test_temperature_0_takes_the_lowest_id_of_the_largest_logits_whatever_the_word():
    for word in (0, LARGEST_WORD):
        assert Policy(temperature=0).choose([1.0, 3.0, 3.0], word=word) == 1


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}])
def test_greedy_policies_give_one_hot_probabilities(options):
    assert Policy(**options).greedy
    assert Policy(**options).probabilities([1.0, 3.0, 3.0]).tolist() == [0, 1, 0]
    assert Policy(**options).weigh(np.array([[1.0, 3.0, 3.0]])).tolist() == [[0, 1, 0]]


def test_a_tiny_temperature_is_greedy_and_never_nan():
    assert Policy(temperature=1e-310).probabilities([1.0, 2.0, 3.0]).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 10**6},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": None, "min_p": None, "temperature": None},
        {"suppress_tokens": None, "logit_bias": None},
        {"typical_p": 1, "min_p": 0, "epsilon_cutoff": 0, "eta_cutoff": 0},
        {"no_repeat_ngram_size": 0, "min_new_tokens": 0},
    ],
    ids=str,
)
def test_options_that_are_off_change_nothing(options):
    logits = np.linspace(-40, 0, 257)
    assert np.array_equal(Policy(**options).probabilities(logits), head.softmax(logits))


def test_top_p_keeps_the_likeliest_and_not_those_tied_with_the_least():
    assert kept(Policy(top_p=0.8), [0.3, 0.1, 0.1, 0.5]) == [0, 3]
    assert kept(Policy(top_p=0.85), [0.3, 0.1, 0.1, 0.5]) == [0, 1, 3]


def test_top_p_of_eight_tenths_keeps_eight_of_ten_equal_tokens():
    assert kept(Policy(top_p=0.8), [0.1] * 10) == list(range(8))


def test_the_smallest_top_p_keeps_the_best_token():
    assert kept(Policy(top_p=1e-8), [0.2, 0.5, 0.3]) == [1]
    assert kept(Policy(top_p=5e-324), [0.2, 0.5, 0.3]) == [1]


def test_a_token_exactly_at_a_decimal_threshold_is_kept():
    tenths = [0.1, 0.2, 0.3, 0.4]
    assert kept(Policy(epsilon_cutoff=0.1), tenths) == [0, 1, 2, 3]
    assert kept(Policy(min_p=0.25), tenths) == [0, 1, 2, 3]
    assert kept(Policy(min_p=0.5), tenths) == [1, 2, 3]


def test_cutoffs_above_every_token_keep_the_best_ones():
    for options in ({"epsilon_cutoff": 1}, {"min_p": 1}):
        assert kept(Policy(**options), [0.4, 0.2, 0.4]) == [0, 2]


def test_typical_p_keeps_every_token_tied_with_the_last():
    assert kept(Policy(typical_p=0.15), [0.3, *[0.1] * 7]) == list(range(1, 8))


def test_typical_p_and_its_ties_are_those_of_the_probabilities():
    # −ln p is as far above the entropy as below: all three are ties, whatever the rounding.
    for weights in ([1, 2, 1], [5, 10, 5], [3, 6, 3]):
        for shift in (0.0, 0.1, 1 / 3, -7.3, 40.7):
            got = Policy(typical_p=0.5).probabilities(np.log(weights) + shift)
            assert np.count_nonzero(got) == 3


def test_top_n_sigma_keeps_what_is_exactly_n_deviations_below_the_best():
    # σ = 1, and the second logit is 2 below the first.
    for shift in (0.0, 0.1, 1 / 3, -7.3):
        assert kept(Policy(top_n_sigma=2), np.exp([0.0 + shift, -2.0 + shift])) == [0, 1]
        assert kept(Policy(top_n_sigma=2 - 1e-7), np.exp([0.0 + shift, -2.0 + shift])) == [0]
    # One above 64 equals is 65/8 deviations above them.
    assert len(kept(Policy(top_n_sigma=8.125), np.exp([0.0, *[-3.0] * 64]))) == 65
    assert kept(Policy(top_n_sigma=8.1249), np.exp([0.0, *[-3.0] * 64])) == [0]
    # Tokens that cannot come do not deviate, and one alone does not either.
    assert kept(Policy(top_n_sigma=2), [0.6, 0.0, 0.6 * np.exp(-2)]) == [0, 2]
    assert kept(Policy(top_n_sigma=1e300), [0.5, 0.0, 0.5]) == [0, 2]
    assert kept(Policy(top_n_sigma=1e-300), [0.4, 0.2, 0.4]) == [0, 2]
    assert kept(Policy(top_n_sigma=1), [0.0, 1.0]) == [1]


@given(
    arrays(np.float64, 9, elements=st.integers(-60, 60).map(lambda n: n / 4)),
    st.integers(0, 4),
    st.integers(1, 40),
)
def test_top_n_sigma_keeps_what_fractions_keep(logits, never, tenths):
    logits[:never] = -np.inf
    possible = [Fraction(float(z)) for z in logits[never:]]
    mean = sum(possible) / len(possible)
    variance = sum((z - mean) ** 2 for z in possible) / len(possible)
    limit = Fraction(tenths, 10) ** 2 * variance
    gap = keep_top_n_sigma(head.gaps(logits), tenths / 10)
    for z, kept_gap in zip(possible, gap[never:], strict=True):
        distance = (max(possible) - z) ** 2
        if abs(distance - limit) > limit / 10**4:  # at the very edge the slack decides
            assert (kept_gap < np.inf) == (distance <= limit)


def test_top_n_sigma_is_the_same_at_any_temperature():
    logits = Stream(5, "logits").uniforms(300) * 20.0
    cold, warm = (
        Policy(top_n_sigma=1.5, temperature=t).probabilities(logits) > 0 for t in (0.5, 8.0)
    )
    assert np.array_equal(cold, warm)
    assert 1 < np.count_nonzero(warm) < 150


def test_each_filter_works_on_what_the_ones_before_it_left():
    # Of [.4 .3 .2 .1], the first two make 4/7 and 3/7: only then is 0.5 reached by one token.
    assert kept(Policy(top_p=0.5), [0.4, 0.3, 0.2, 0.1]) == [0, 1]
    assert kept(Policy(top_k=2, top_p=0.5), [0.4, 0.3, 0.2, 0.1]) == [0]


def test_frequency_counts_every_occurrence_and_repetition_one():
    logits, history = [0.0, 0.0, 0.0], [0, 0, 1]
    frequency = Policy(frequency_penalty=1.0).probabilities(logits, history)
    assert frequency == pytest.approx(head.softmax([-2.0, -1.0, 0.0]), abs=1e-12)
    presence = Policy(presence_penalty=1.0).probabilities(logits, history)
    assert presence == pytest.approx(head.softmax([-1.0, -1.0, 0.0]), abs=1e-12)
    repetition = Policy(repetition_penalty=2.0).probabilities([0.5, -1.0, 0.0], history)
    assert repetition == pytest.approx(head.softmax([0.25, -2.0, 0.0]), abs=1e-12)


def test_logits_may_be_numbers_of_any_kind():
    policy = Policy(logit_bias={1: 0.5}, suppress_tokens=[0])
    expected = policy.probabilities([3.0, 2.0, 1.0]).tolist()
    for logits in ([3, 2, 1], np.array([3, 2, 1], np.uint8), np.array([3, 2, 1], np.float32)):
        assert policy.probabilities(logits).tolist() == expected


# In the order in which they apply, as contract and help say; each with a setting that bites.
ORDER = {
    "logit_bias": {1: -1.5, 2: 2.0},
    "repetition_penalty": 1.7,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.5,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": (3,),
    "min_new_tokens": 1,
    "temperature": 0.5,
    "top_n_sigma": 1.3,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.2,
    "typical_p": 0.7,
    "epsilon_cutoff": 0.12,
    "eta_cutoff": 0.25,
}
PLACE = {name: place for place, name in enumerate(ORDER)}
HISTORY = (1, 2, 4, 4, 5, 4, 1)
TABLE = np.rint(Stream(1, "logits").uniforms(40 * 9).reshape(40, 9) * 64.0 - 24.0) / 8.0


def one_after_the_other(names, z):
    """What the options make of logits, each alone, applied to what the ones before it left."""
    for name in names:
        policy = Policy(**{name: ORDER[name]})
        if PLACE[name] < PLACE["temperature"]:
            z, _ = policy.adjust(z, policy.history([HISTORY] * len(z), z.shape[-1]))
        else:
            with np.errstate(divide="ignore"):
                z = np.log(policy.weigh(z) / policy.weigh(z).sum(axis=-1, keepdims=True))
    return z


def test_the_order_of_the_table_is_that_of_the_options():
    assert [*ORDER] == [*OPTIONS]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("logit_bias", "repetition_penalty"),
        ("repetition_penalty", "frequency_penalty"),
        ("repetition_penalty", "presence_penalty"),
        ("presence_penalty", "temperature"),
        ("suppress_tokens", "top_k"),
        ("no_repeat_ngram_size", "top_p"),
        ("temperature", "top_p"),
        ("temperature", "epsilon_cutoff"),
        ("top_n_sigma", "top_k"),
        ("top_k", "top_p"),
        ("top_p", "min_p"),
        ("top_p", "typical_p"),
        ("min_p", "typical_p"),
        ("typical_p", "epsilon_cutoff"),
        ("epsilon_cutoff", "eta_cutoff"),
    ],
)
def test_an_option_works_on_what_those_before_it_have_left(first, second):
    def p(z):
        return np.exp(z - z.max(axis=-1, keepdims=True)) / np.exp(
            z - z.max(axis=-1, keepdims=True)
        ).sum(axis=-1, keepdims=True)

    both = Policy(**{name: ORDER[name] for name in (second, first)})
    got = both.probabilities(TABLE, HISTORY)
    assert got == pytest.approx(p(one_after_the_other([first, second], TABLE)), abs=1e-8)
    other = p(one_after_the_other([second, first], TABLE))
    assert np.abs(got - other).max() > 1e-3  # else the pair would show nothing


def test_without_a_prompt_each_token_of_the_history_is_new():
    policy, z = Policy(min_new_tokens=1), np.where(np.arange(257) == 256, 9.0, 0.0)
    assert [policy.probabilities(z, history)[256] > 0 for history in ([], [7])] == [False, True]
    assert [policy.choose(z, history, 2**63) == 256 for history in ([], [7])] == [False, True]


def test_end_of_text_waits_for_the_minimum_of_new_tokens():
    policy = Policy(min_new_tokens=2)
    logits = np.zeros(257)
    assert policy.probabilities(logits, [7, 7, 7], prompt_length=2)[256] == 0
    assert policy.probabilities(logits, [7, 7, 7, 7], prompt_length=2)[256] > 0


@pytest.mark.parametrize("length", [0, 1, 5, 40])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ngram_index_forbids_what_a_plain_search_finds(size, length):
    history = Stream(1, f"ngrams {size}").integers(length, 4).tolist()
    forbidden = {
        history[i + size - 1]
        for i in range(length - size + 1)
        if history[i : i + size - 1] == history[length - size + 1 :]
    }
    p = Policy(no_repeat_ngram_size=size).probabilities(np.zeros(6), history)
    assert set(np.flatnonzero(p == 0).tolist()) == forbidden


def test_a_history_that_goes_back_or_splits_knows_what_a_fresh_one_knows():
    policy = Policy(no_repeat_ngram_size=2, frequency_penalty=1.0)
    history = policy.history([[1, 2, 1], [3, 3]], 5)
    history.append([2, 4])
    history.append([4, 4])
    history.append([2, 4])
    history.pop([2, 4])
    history.pop([4, 4])
    assert [n.repeating() for n in history.ngrams] == [[1], []]
    history.select([0, 0, 1])
    history.append([1, 3, 3])
    fresh = policy.history([[1, 2, 1, 2, 1], [1, 2, 1, 2, 3], [3, 3, 4, 3]], 5, new_tokens=2)
    assert history.new_tokens == fresh.new_tokens
    assert np.array_equal(history.counts, fresh.counts)
    assert [n.repeating() for n in history.ngrams] == [n.repeating() for n in fresh.ngrams]


@pytest.mark.parametrize(
    ("options", "history", "rule"),
    [
        ({"suppress_tokens": [0, 1, 2]}, [], "suppress_tokens"),
        ({"no_repeat_ngram_size": 1}, [0, 1, 2], "no_repeat_ngram_size=1"),
    ],
)
def test_a_rule_that_leaves_nothing_is_named(options, history, rule):
    with pytest.raises(DeadEndError, match=rule):
        Policy(**options).probabilities([0.0, 0.0, 0.0], history)


@pytest.mark.parametrize("policy", [Policy(), Policy(temperature=0), Policy(top_k=2, top_p=0.5)])
@pytest.mark.parametrize(
    ("bad", "cause"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "all are -inf")]
)
def test_logits_without_a_distribution_are_an_error_that_says_so(policy, bad, cause):
    logits = [bad] * 3 if bad == -np.inf else [0.0, bad, 0.0]
    with pytest.raises(MinigenError, match=cause):
        policy.choose(logits, word=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be a number, at least 0 (got -1)"),
        ({"temperature": float("nan")}, "temperature must be a number, at least 0 (got nan)"),
        ({"temperature": "hot"}, "temperature must be a number, at least 0 (got 'hot')"),
        ({"top_p": 1.5}, "top_p must be a number, between 0 and 1 (got 1.5)"),
        ({"top_p": True}, "top_p must be a number, between 0 and 1 (got True)"),
        ({"min_p": -0.1}, "min_p must be a number, between 0 and 1 (got -0.1)"),
        ({"typical_p": float("inf")}, "typical_p must be a number, between 0 and 1 (got inf)"),
        ({"top_k": -1}, "top_k must be a whole number, at least 0 (got -1)"),
        ({"top_k": 2.5}, "top_k must be a whole number, at least 0 (got 2.5)"),
        ({"top_k": True}, "top_k must be a whole number, at least 0 (got True)"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number, greater than 0 (got 0)"),
        ({"frequency_penalty": -float("inf")}, "frequency_penalty must be a number, finite (got"),
        ({"presence_penalty": 10**400}, "presence_penalty must be a number, finite"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of token ids (got 5)"),
        ({"suppress_tokens": "ab"}, "suppress_tokens must be a list of token ids (got 'ab')"),
        ({"logit_bias": [(4, 1.0)]}, "logit_bias must be a table of token ids and numbers (got"),
        ({"top_n_sigma": 0}, "top_n_sigma must be a number, greater than 0 (got 0)"),
        ({"suppress_tokens": [-3]}, "a suppressed token's id must be a whole number"),
        ({"suppress_tokens": [2.5]}, "a suppressed token's id must be a whole number"),
        ({"eta_cutoff": 1.1}, "eta_cutoff must be a number, between 0 and 1 (got 1.1)"),
        ({"logit_bias": {4: float("nan")}}, "a logit bias must be a number, finite (got nan)"),
        ({"min_new_tokens": -2}, "min_new_tokens must be a whole number, at least 0 (got -2)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_option_out_of_range_is_refused_with_rule_value_and_cure(options, message):
    with pytest.raises(OptionError) as caught:
        Policy(**options)
    text = str(caught.value)
    assert text.startswith(message)
    assert "; " in text
    assert "\n" not in text


def test_the_edges_of_a_range_belong_to_it():
    largest = float_info.max
    ends = {
        "repetition_penalty": (5e-324, largest),
        "frequency_penalty": (-largest, largest),
        "temperature": (0, largest),
        "top_n_sigma": (5e-324, largest),
        "top_k": (0, 10**400),
        "epsilon_cutoff": (0, 1),
        "typical_p": (0, 1),
        "suppress_tokens": ((), (0,)),
        "logit_bias": ({0: -largest}, {0: largest}),
    }
    for name, values in ends.items():
        for value in values:
            assert getattr(Policy(**{name: value}), name) == value


def test_a_policy_shows_what_it_changes_and_takes_names_alone():
    assert repr(Policy(top_k=4, temperature=0.7)) == "Policy(temperature=0.7, top_k=4)"
    with pytest.raises(TypeError):
        Policy(0.7)
    with pytest.raises(OptionError, match=r"\(got policy and top_k, min_p\)"):
        Policy.of(Policy(), {"top_k": 4, "min_p": 0.1})


def test_the_examples_and_ranges_of_the_options_are_those_of_the_config_file():
    lines = (Path(__file__).parents[2] / "configs/fables.toml").read_text().splitlines()
    shown = dict(line.removeprefix("# ").split(" = ", 1) for line in lines if " = " in line)
    for name, option in OPTIONS.items():
        if option.example is not None:
            example = str(option.example).replace("{'65': ", '{ "65" = ').replace("}", " }")
            assert shown[name] == f"{example} # {option.kind.rule}"


def test_a_history_holds_nothing_that_no_rule_asks_for():
    asked = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
    for name in OPTIONS:
        value = asked.get(name, {1: 1.0} if name == "logit_bias" else OPTIONS[name].example)
        history = Policy(**{name: value}).history([[1]], 5)
        assert history.counts.size == (5 if name in asked else 0)
        assert len(history.ngrams) == (name == "no_repeat_ngram_size")


@pytest.mark.parametrize("word", [-1, 2**64])
def test_what_is_no_word_is_refused(word):
    with pytest.raises(OptionError, match=f"from 0 to below 2\\^64 \\(got {word}\\)"):
        Policy().choose([0.0, 1.0], word=word)


@pytest.mark.parametrize("length", [-1, -(10**5000)], ids=["-1", "long"])
def test_no_prompt_has_fewer_tokens_than_none(length):
    with pytest.raises(OptionError, match=r"^prompt_length must be a whole number, at least 0"):
        Policy().choose([0.0, 1.0], [1], prompt_length=length)


def test_a_choice_is_made_of_one_row_of_logits():
    assert Policy(temperature=0).choose([[0.0, 1.0]]) == 1
    with pytest.raises(OptionError, match=r"those of one token, \(V,\) \(got \(2, 2\)\)"):
        Policy().choose([[0.0, 1.0], [1.0, 0.0]])
    for none in (np.zeros((0, 2)), np.zeros((1, 1, 2)), np.array(1.0)):
        with pytest.raises(OptionError, match=r"^logits must be"):
            Policy().choose(none)
    for shape in ((), (1, 1, 2)):
        with pytest.raises(OptionError, match=r"^logits must be \(V,\) or \(R, V\) \(got shape"):
            Policy().probabilities(np.zeros(shape))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_logits_without_a_token_are_said_to_be_none(shape):
    with pytest.raises(
        MinigenError, match=rf"at least one number \(got shape {re.escape(str(shape))}"
    ):
        Policy().probabilities(np.zeros(shape))


def test_equal_policies_are_one_in_a_set():
    policies = [Policy(top_p=0.9, logit_bias={1: 2.0}) for _ in range(2)]
    assert {*policies, Policy(logit_bias={1: 2.0})} == {policies[0], Policy(logit_bias={1: 2.0})}
    assert len({*policies}) == 1


def test_what_is_written_into_one_policy_stays_in_it():
    for options in ({}, {"logit_bias": None}, {"logit_bias": {}}):
        Policy(**options).logit_bias[7] = 9.0  # type: ignore[index]
    assert [Policy().logit_bias, Policy(logit_bias=None).logit_bias] == [{}, {}]


@pytest.mark.parametrize(
    "options",
    [{"suppress_tokens": [5]}, {"logit_bias": {5: 1.0}}, {"suppress_tokens": [10**5000]}],
    ids=["suppressed", "biased", "beyond words"],
)
def test_an_id_beyond_the_vocabulary_is_an_error(options):
    with pytest.raises(MinigenError, match=r"ids below 5.*got (5|a number too long)") as caught:
        Policy(**options).probabilities(np.zeros(5))
    assert type(caught.value) is MinigenError


@pytest.mark.parametrize("token", [-1, 5])
def test_a_history_beyond_the_vocabulary_is_an_error(token):
    with pytest.raises(OptionError, match=rf"token ids must be from 0 to 4 \(got {token}\)"):
        Policy().probabilities(np.zeros(5), [0, token])


def test_the_largest_word_draws_the_last_possible_token_and_the_smallest_the_first():
    logits = [-np.inf, 0.0, -1.0, -np.inf]
    assert Policy().choose(logits, word=LARGEST_WORD) == 2
    assert Policy().choose(logits, word=0) == 1


def test_a_draw_is_the_first_token_whose_cumulative_weight_exceeds_the_scaled_word():
    w = np.array([[3.0, 0.0, 5.0, 1.0]])
    for word in [0, *(part * 2**64 // 9 + d for part in range(1, 9) for d in (-1, 0, 1))]:
        point = word * 9 >> 64
        expected = 0 if point < 3 else 2 if point < 8 else 3
        assert draw(w, np.array([word], dtype=np.uint64)).tolist() == [expected]


def test_a_million_draws_never_give_a_token_of_weight_zero():
    w, _ = head.integer_weights(np.array([-np.inf, 3.0, -50.0, 0.0, -1.0, -np.inf]))
    words = Stream(0, "inference").words(10**6)
    drawn = [draw(np.broadcast_to(w, (len(part), 6)), part) for part in np.split(words, 10)]
    assert np.unique(drawn).tolist() == [1, 3, 4]


def test_draws_follow_the_exact_weights():
    # Pearson's statistic of 10⁵ draws, 9 degrees of freedom: above 27.88 once in 1,000 seeds.
    w = np.array([1.0, 2, 3, 5, 8, 13, 21, 34, 55, 89])
    words = Stream(7, "inference").words(10**5)
    counts = np.bincount(draw(np.broadcast_to(w, (len(words), 10)), words), minlength=10)
    expected = w / 231 * len(words)
    assert ((counts - expected) ** 2 / expected).sum() < 27.88


def test_shares_are_exact_where_floats_are_not():
    S = 2.0**52 - 1
    assert share(0.1, np.array([[S]])).tolist() == [[-(-int(S) // 10)]]
    assert Fraction(0.1) * 10 > 1  # the float itself is a little more than a tenth
    assert share(0.1, np.array([[10.0]])).tolist() == [[1.0]]


def test_top_p_keeps_of_equal_weights_the_lower_ids_in_every_row():
    w = np.array([[2.0, 4.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    assert keep_top_p(w, w, 0.7).tolist() == [[2, 4, 2, 0], [1, 1, 1, 0]]
    assert keep_top_p(w, w, 0.6).tolist() == [[2, 4, 0, 0], [1, 1, 1, 0]]  # 6 of 10 is enough


def test_thresholds_are_met_exactly_where_sums_are_too_small_for_slack():
    w = np.array([[1.0, 2.0, 3.0, 4.0]])
    gap = np.log(4.0 / w)
    assert filters.keep_epsilon(w, gap, 0.2).tolist() == [[0, 2, 3, 4]]
    assert filters.keep_min_p(w, gap, 0.75).tolist() == [[0, 0, 3, 4]]
    assert filters.keep_eta(w, gap, 0.2).tolist() == [[0, 2, 3, 4]]
    assert keep_typical_p(np.array([[1.0, 1.0]]), np.zeros((1, 2)), 1.0).tolist() == [[1, 1]]
    assert filters.slack(np.array([2.0**40 - 1, 2.0**41])).tolist() == [0, 2]


def test_typical_p_is_deaf_to_what_was_dropped_and_takes_a_distance_of_its_slack_for_a_tie():
    w, gap = np.array([[5.0, 0.0, 3.0]]) * 2**40, np.array([[0.0, 1.0, 2.0]])  # mean gap 6/8
    assert (keep_typical_p(w, gap, 5e-324) > 0).tolist() == [[True, False, False]]
    for beyond, kept_weights in ((2.0**-40, [1, 1]), (2.0**-39, [1, 0])):
        gap = np.array([[0.0, 2.0 + beyond]])  # both are 1 from the mean, which is an integer sum
        assert keep_typical_p(np.ones((1, 2)), gap, 0.5).tolist() == [kept_weights]


@pytest.mark.parametrize("name", ["top_n_sigma", "top_k", "top_p", "min_p", "typical_p"])
def test_a_filter_takes_one_row_or_blocks_of_rows_as_well(name):
    option, value = OPTIONS[name], OPTIONS[name].example
    gap = head.gaps(TABLE)
    operands = [gap] if option.works_on == "gaps" else [filters.weights(gap), gap]
    whole = option.function(*operands, value)
    for shape in ((9,), (2, 2, 9)):
        rows = int(np.prod(shape)) // 9
        part = option.function(*(x[:rows].reshape(shape) for x in operands), value)
        assert np.array_equal(part, whole[:rows].reshape(shape))


def test_top_k_keeps_the_k_least_gaps_whatever_k_is():
    gap = Stream(0, "gaps").uniforms(4 * 257).reshape(4, 257)
    ordered = np.sort(gap, axis=-1)
    for k in range(1, 258):  # numpy parts short rows, and some ranks of long ones, by sorting all
        assert np.array_equal(keep_top_k(gap, k) < np.inf, gap <= ordered[:, k - 1, None])


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 5),
        "top_n_sigma": st.floats(0.1, 4),
        "top_k": st.integers(0, 12),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0, 1),
        "epsilon_cutoff": st.floats(0, 1),
        "eta_cutoff": st.floats(0, 1),
    },
).map(lambda options: Policy(**options))
# Quarters, so that ties are common and that shifts by whole numbers are exact.
LOGITS = arrays(np.float64, 9, elements=st.integers(-60, 60).map(lambda n: n / 4))


@given(POLICIES, LOGITS)
def test_filters_only_ever_remove_and_leave_a_distribution(policy, logits):
    p = policy.probabilities(logits)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    if not policy.greedy:
        warm = head.softmax(logits / policy.temperature)
        kept = p > 0
        assert p[kept] == pytest.approx(warm[kept] / warm[kept].sum(), rel=1e-6, abs=1e-9)


@given(POLICIES, LOGITS, st.integers(-1000, 1000))
def test_shifting_all_logits_changes_no_bit(policy, logits, shift):
    shifted = policy.probabilities(logits + shift)
    assert np.array_equal(policy.probabilities(logits), shifted)


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=9),
    st.sampled_from([n / 8 for n in range(1, 9)]),
    st.floats(-50, 50),
)
def test_a_constant_added_to_logarithms_changes_no_filter_ties_included(counts, at, shift):
    # Eighths of small counts: thresholds and ties are met exactly, but for the rounding.
    logits = np.log(counts)
    for name, option in OPTIONS.items():
        if option.samples:
            value = int(8 * at) if name == "top_k" else at
            policy = Policy(**{name: value})
            kept_before, kept_after = (
                policy.probabilities(z) > 0 for z in (logits, logits + shift)
            )
            assert np.array_equal(kept_before, kept_after), name


@given(POLICIES, st.permutations(range(9)), st.permutations(range(9)))
def test_permuting_ids_permutes_the_result(policy, order, ranks):
    logits = np.array(ranks) / 3  # all different: ties go by id
    assert np.array_equal(policy.probabilities(logits[order]), policy.probabilities(logits)[order])


@given(LOGITS, st.floats(0, 1), st.floats(0, 1))
def test_top_p_is_monotone(logits, p, q):
    smaller, larger = (Policy(top_p=x).probabilities(logits) > 0 for x in sorted((p, q)))
    assert not (smaller & ~larger).any()


@settings(max_examples=30)
@given(POLICIES, arrays(np.float64, (5, 9), elements=st.integers(-60, 60).map(lambda n: n / 4)))
def test_a_batch_gives_each_row_what_it_gets_alone(policy, logits):
    alone = [policy.probabilities(row) for row in logits]
    assert np.array_equal(policy.probabilities(logits), alone)


@given(LOGITS, st.floats(0, 1))
def test_top_p_keeps_the_smallest_prefix_in_fractions(logits, p):
    w, S = head.integer_weights(logits)
    order = sorted(range(9), key=lambda i: (-w[i], i))
    mass, expected = Fraction(int(S[0]) // 2**40), set()
    for i in order:
        expected.add(i)
        mass += int(w[i])
        if mass >= Fraction(repr(p)) * int(S[0]):
            break
    assert set(np.flatnonzero(keep_top_p(w, w, p)).tolist()) == {i for i in expected if w[i]}


@given(LOGITS, st.integers(1, 99))
def test_typical_p_keeps_the_nearest_to_the_entropy_in_fractions(logits, percent):
    w, gap = head.integer_weights(logits)[0], head.gaps(logits)
    total = sum(int(x) for x in w)
    mean = float(mean_gap(w, gap, np.array([total]))[0])
    distances = [abs(float(x) - mean) for x in gap]
    needed = Fraction(percent, 100) * total - total // 2**40
    mass = 0
    for last in sorted({d for d, x in zip(distances, w, strict=True) if x}):
        mass += sum(int(x) for d, x in zip(distances, w, strict=True) if d == last)
        if mass >= needed:
            break
    expected = [x if d <= last else 0.0 for d, x in zip(distances, w, strict=True)]
    assert keep_typical_p(w, gap, percent / 100).tolist() == expected


@pytest.mark.parametrize("kind", [list, np.uint8, np.float32, np.float64])
def test_logits_are_numbers_of_any_type(kind):
    numbers = [3, 1, 2]
    logits = numbers if kind is list else np.array(numbers, dtype=kind)
    policy = Policy(presence_penalty=0.25, top_k=2)
    expected = np.exp([2.75, -np.inf, 2.0])
    assert policy.probabilities(logits, [0]) == pytest.approx(expected / expected.sum(), abs=1e-12)
    assert [policy.choose(logits, [0], word) for word in (0, 2**64 - 1)] == [0, 2]


def test_a_vocabulary_without_end_of_text_has_none_to_delay():
    for V, forbidden in ((256, []), (257, [256])):
        p = Policy(min_new_tokens=1).probabilities(np.zeros(V))
        assert np.flatnonzero(p == 0.0).tolist() == forbidden
