"""Beam search finds what the reference finds; with beams enough, what trying every text finds."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from sys import float_info

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minigen.decoding.beams import beam_search, best_first, length_power
from minigen.decoding.generation import Task, complete, generate
from minigen.decoding.policy import Policy
from minigen.errors import OptionError
from minigen.exact.streams import Stream
from minigen.model import head
from minigen.model.model import Model
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "decoding.json").read_text())["beams"]
TOKENIZER = ByteTokenizer()


class Bigrams:
    """A fake model: the last token alone picks a row of logits, of the first tokens or of all.

    ``end`` is the token of the table that stands for the end of a text.
    """

    vocab_size, context_length = 257, 1

    def __init__(self, table, end=None):
        self.table = np.full((257, 257), -np.inf)
        self.table[: len(table), : len(table)] = table
        if end is not None:
            self.table[:, [end, END_OF_TEXT]] = self.table[:, [END_OF_TEXT, end]]

    def logits(self, contexts):
        return self.table[contexts[:, -1]]


def search(table, prompt, policy=None, end=None, *, max_new_tokens, **options):
    """Search with beams in a table of bigrams; return scores and tokens."""
    task = Task(Bigrams(table, end), TOKENIZER, policy, max_new_tokens)
    texts = beam_search(task, bytes(prompt), **options)
    return [(t.score, [end if i == END_OF_TEXT else i for i in t.token_ids]) for t in texts]


def small_model():
    model = Model(257, 4, 8)
    model.initialize(Stream(3, "init"))
    model.parameters["W"] *= 8.0
    model.changed()
    return model


@pytest.mark.parametrize("case", VECTORS["runs"], ids=lambda c: str((*c.values(),)[:2]))
def test_beams_find_what_the_transformers_library_finds(case):
    found = search(
        VECTORS["table"],
        VECTORS["prompt"],
        end=VECTORS["end_of_text"],
        num_beams=case["num_beams"],
        length_penalty=case["length_penalty"],
        max_new_tokens=VECTORS["max_new_tokens"],
    )
    for score, tokens in found:  # which of equals come last is up to a last bit
        is_last = score == pytest.approx(case["scores"][-1], abs=1e-9)
        assert is_last or VECTORS["prompt"] + tokens in case["sequences"]
    assert [score for score, _ in found] == pytest.approx(case["scores"], abs=1e-9)


def every_text(table, length, length_penalty, end_of_text):
    """Score all texts up to a length that end with end of text, and all of that length."""
    log_p = head.log_softmax(table)
    scores = {}
    for n in range(1, length + 1):
        for tokens in product(range(len(table)), repeat=n):
            if end_of_text in tokens[:-1] or (n < length and tokens[-1] != end_of_text):
                continue
            total = sum(log_p[a, b] for a, b in zip((0, *tokens), tokens, strict=False))
            scores[tokens] = total / n**length_penalty
    return sorted(scores.items(), key=lambda text: -text[1])


@settings(max_examples=40)
@given(
    arrays(np.float64, (3, 3), elements=st.floats(-3, 3), unique=True),
    st.sampled_from([-0.5, 0.0, 0.7, 1.0, 2.0]),
)
def test_with_beams_for_every_text_the_search_is_exhaustive(table, length_penalty):
    options = {"num_beams": 3**4, "length_penalty": length_penalty, "max_new_tokens": 4}
    found = search(table, [0], end=2, **options)
    expected = every_text(table, 4, length_penalty, end_of_text=2)
    assert [score for score, _ in found] == pytest.approx([score for _, score in expected])
    assert {tuple(tokens) for _, tokens in found} == {tokens for tokens, _ in expected}


def test_a_beam_whose_best_continuation_ends_goes_on_with_the_next_best():
    table = np.log([[0.1, 0.4, 0.5], [0.98, 0.01, 0.01], [1.0, 1.0, 1.0]])
    found = search(table, [0], end=2, num_beams=1, max_new_tokens=2)
    assert [tokens for _, tokens in found] == [[1, 0]]  # (ln .4 + ln .98)/2 > ln .5


def test_equal_scores_keep_the_order_of_ids():
    found = search(np.zeros((4, 4)), [0], num_beams=3, max_new_tokens=2)
    assert [tokens for _, tokens in found] == [[0, 0], [0, 1], [0, 2]]


def test_one_beam_is_greedy_where_no_text_ends():
    policy = Policy(suppress_tokens=[END_OF_TEXT], no_repeat_ngram_size=2, frequency_penalty=0.5)
    greedy = replace(policy, temperature=0)
    text = beam_search(
        Task(small_model(), TOKENIZER, policy, max_new_tokens=30), "so", num_beams=1
    )[0]
    expected = complete(
        generate(Task(small_model(), TOKENIZER, greedy, max_new_tokens=30), ["so"])
    )[0]
    assert text.token_ids == expected.token_ids


def test_the_score_is_the_mean_log_probability_at_length_penalty_one():
    task = Task(small_model(), TOKENIZER, max_new_tokens=7, log_probabilities=True)
    texts = beam_search(task, "so", num_beams=3)
    assert len(texts) == 3
    for text in texts:
        mean = sum(text.log_probabilities) / len(text.token_ids)
        assert text.score == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("length_penalty", [-1e300, -1000.0, 1000.0, 1e300])
def test_no_length_penalty_is_too_large(length_penalty):
    texts = beam_search(
        Task(small_model(), TOKENIZER, max_new_tokens=7),
        "so",
        num_beams=3,
        length_penalty=length_penalty,
    )
    assert len(texts) == 3
    assert all(text.score <= 0 for text in texts)


def test_more_beams_find_a_text_at_least_as_likely():
    scores = [
        beam_search(Task(small_model(), TOKENIZER, max_new_tokens=6), "so", num_beams=n)[0].score
        for n in (1, 64)
    ]
    assert scores[0] < scores[1]


def test_beams_end_at_stop_strings_and_end_of_text():
    table = np.full((257, 257), -9.0)
    table[:, ord("a")] = 1.0
    table[ord("a"), ord("b")] = 2.0
    table[ord("b"), ord("c")] = 3.0
    table[ord("b"), END_OF_TEXT] = 2.5
    texts = beam_search(
        Task(Bigrams(table), TOKENIZER, stop="c", max_new_tokens=9),
        "x",
        num_beams=2,
        length_penalty=0,
    )
    assert [(t.text, t.finish_reason) for t in texts] == [("ab", "stop"), ("ab", "end_of_text")]


def test_a_stop_string_begins_in_the_text_of_the_beam_that_it_ends():
    table = np.full((257, 257), -9.0)
    table[ord("x"), [*b"ca"]] = 1.0, 0.9  # the best beam is c, and the other one a
    table[[*b"ca"], ord("b")] = 5.0
    table[ord("b"), ord("d")] = 5.0
    texts = beam_search(
        Task(Bigrams(table), TOKENIZER, stop="ab", max_new_tokens=3),
        "x",
        num_beams=2,
        length_penalty=0,
    )
    ends = [(t.text, t.finish_reason, bytes(t.token_ids)) for t in texts]
    assert sorted(ends) == [("", "stop", b"ab"), ("cbd", "length", b"cbd")]
    assert all(t.log_probabilities is None for t in texts)  # which costs time: only if asked for


def test_a_character_of_several_tokens_is_that_of_the_beam_that_holds_them():
    table = np.full((257, 257), -9.0)
    table[ord("x"), [0xC3, 0xC2]] = 1.0, 0.9
    table[0xC3, 0xA9] = table[0xC2, 0xB5] = 5.0
    task = Task(Bigrams(table), TOKENIZER, max_new_tokens=2)
    assert [text.text for text in beam_search(task, "x", num_beams=2)] == ["é", "µ"]


def test_each_step_looks_at_twice_as_many_texts_as_there_are_beams_and_at_no_more():
    table = np.full((257, 257), -9.0)
    table[ord("x"), [*b"abc"]] = 1.0, 0.9, 0.8  # two of them are stop strings
    table[ord("c"), ord("c")] = 9.0
    for stop, texts in ((["a", "b"], [""]), (["a"], ["b"])):
        task = Task(Bigrams(table), TOKENIZER, stop=stop, max_new_tokens=2)
        found = beam_search(task, "x", num_beams=1, length_penalty=9)
        assert [text.text[:1] for text in found] == texts


def test_a_text_that_ends_is_finished_only_where_it_is_one_of_the_best():
    table = np.full((257, 257), -9.0)
    table[ord("x"), [ord("a"), END_OF_TEXT]] = 1.0, 0.9
    table[ord("a")] = 0.0  # what follows is a poor end
    for count, ends in ((1, False), (2, True)):
        task = Task(Bigrams(table), TOKENIZER, max_new_tokens=2)
        found = beam_search(task, "x", num_beams=count)
        assert ([END_OF_TEXT] in [text.token_ids for text in found]) == ends


@pytest.mark.parametrize(("least", "text", "length"), [(2, "a", 2), (3, "aba", 4)])
def test_a_stop_string_ends_a_beam_from_the_minimum_of_new_tokens_on(least, text, length):
    table = np.full((257, 257), -9.0)
    table[[*b"xb"], ord("a")] = table[ord("a"), ord("b")] = 9.0
    policy = Policy(min_new_tokens=least)
    task = Task(Bigrams(table), TOKENIZER, policy, stop="b", max_new_tokens=5)
    found = beam_search(task, "x", num_beams=1)[0]
    assert (found.text, len(found.token_ids), found.finish_reason) == (text, length, "stop")


def test_logit_rules_see_the_history_of_each_beam():
    policy = Policy(no_repeat_ngram_size=1, suppress_tokens=[1])
    table = np.tile(np.arange(6.0), (6, 1))
    found = search(table, [5], policy, num_beams=2, max_new_tokens=4)
    assert [sorted(tokens) for _, tokens in found] == [[0, 2, 3, 4]] * 2


def test_penalties_see_the_history_of_each_beam():
    policy = Policy(frequency_penalty=100.0)
    table = np.tile(np.arange(4.0), (4, 1))
    found = search(table, [0], policy, num_beams=3, max_new_tokens=3)
    assert all(sorted(tokens) == [1, 2, 3] for _, tokens in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": Policy(top_k=5)}, r"beams take no sampling options \(got top_k=5\)"),
        ({"policy": Policy(temperature=0)}, r"no sampling options \(got temperature=0.0\)"),
        ({"num_beams": 0}, r"num_beams must be a whole number, at least 1 \(got 0\)"),
        ({"length_penalty": float("nan")}, r"length_penalty must be a number, finite \(got nan\)"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be a whole number, at least 1 \(got 0\)"),
    ],
)
def test_what_beams_cannot_do_is_refused(options, message):
    options = dict(options)
    of_task = {k: options.pop(k) for k in ("policy", "max_new_tokens") if k in options}
    with pytest.raises(OptionError, match=message):
        beam_search(Task(small_model(), TOKENIZER, **of_task), "a", **{"num_beams": 2, **options})


def test_powers_of_a_length_are_exact_at_zero_and_one():
    lengths = range(1, 500)
    assert [length_power(n, 0.0) for n in lengths] == [1.0] * 499
    assert [length_power(n, 1.0) for n in lengths] == [*lengths]
    assert length_power(7, 0.6) == pytest.approx(7**0.6, rel=1e-13)
    assert [length_power(0, penalty) for penalty in (-2.0, 0.5, 1.0)] == [1.0] * 3
    for penalty in (-1e300, -float_info.max):  # the smallest that a score may be divided by
        assert length_power(10**6, penalty) == 2.0**-1022


SCORES = [-np.inf, 0.0, -1.0, 2.5, np.inf]


@given(
    arrays(np.float64, st.integers(1, 40), elements=st.sampled_from(SCORES)),
    st.integers(1, 50),
)
def test_the_best_are_those_of_a_full_stable_sort_that_never_finds_infinities(scores, count):
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i] if np.isfinite(scores[i]) else 9)
    expected = [i for i in ranked[:count] if np.isfinite(scores[i])]
    assert best_first(scores, count).tolist() == expected
