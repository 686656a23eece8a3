"""A dead end ends one text: its neighbours, its other beams and a training go on."""

from itertools import product
from typing import get_args

import numpy as np
import pytest

from minigen import Config, Run
from minigen.decoding.beams import beam_search
from minigen.decoding.generation import FinishReason, Task, complete, generate
from minigen.decoding.policy import DeadEndError, Policy
from minigen.decoding.speculation import speculate
from minigen.errors import MinigenError
from minigen.exact.streams import Stream
from minigen.model import head
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer
from tests.decoding.test_beams import Bigrams

TOKENIZER = ByteTokenizer()
NEVER = -np.inf


class Letters:
    """A fake model of bigrams over a few letters: all else has the logit −inf."""

    vocab_size, context_length = 257, 1

    def __init__(self, seed, letters=b"abc", end=True):
        ids = [*letters, *[END_OF_TEXT] * end]
        self.table = np.full((257, 257), NEVER)
        uniforms = Stream(seed, "bigrams").uniforms(257 * len(ids)).reshape(257, -1)
        self.table[:, ids] = np.rint(uniforms * 8.0) / 2.0  # ties are common

    def logits(self, contexts):
        return self.table[contexts[:, -1]]


def texts(model, prompts, policy, count=None, **options):
    task = Task(model, TOKENIZER, policy, **options)
    return complete(generate(task, prompts, lambda i: Stream(0, f"inference/{i}")))


# No letter twice: behind "abc" there is room for five.
STUCK = Policy(no_repeat_ngram_size=1)
LETTERS = Letters(1, b"abcdefgh", end=False)


@pytest.mark.parametrize(
    "prompts",
    [["abcdefgh", "a", "bc"], ["a", "abcdefgh", "bc"], ["a", "bc", "abcdefgh"], ["abcdefgh"] * 2],
    ids=["first", "middle", "last", "all"],
)
def test_a_text_in_a_dead_end_leaves_its_neighbours_as_they_are(prompts):
    together = texts(LETTERS, prompts, STUCK, max_new_tokens=4, log_probabilities=True)
    for i, (prompt, text) in enumerate(zip(prompts, together, strict=True)):
        task = Task(LETTERS, TOKENIZER, STUCK, max_new_tokens=4, log_probabilities=True)
        alone = generate(task, [prompt], lambda _, i=i: Stream(0, f"inference/{i}"))
        assert complete(alone) == [text]
        assert (text.finish_reason == "dead_end") == (prompt == "abcdefgh")


def test_a_dead_end_keeps_the_text_so_far_and_says_which_rules_left_nothing():
    text = texts(LETTERS, ["abc"], STUCK, stop="zz")[0]
    assert (text.finish_reason, sorted(text.text)) == ("dead_end", [*"defgh"])
    assert bytes(text.token_ids) == text.text.encode()
    told = "no_repeat_ngram_size=1 leaves no token to choose from; loosen it or leave it out"
    assert text.explanation == told


def test_a_dead_end_draws_no_word_and_releases_what_was_held_back():
    stream = Stream(0, "inference")
    pieces = [*generate(Task(LETTERS, TOKENIZER, STUCK, stop="hh"), ["abcdefg"], lambda _: stream)]
    assert [(p.token_id, p.text) for p in pieces] == [(ord("h"), ""), (None, "h")]
    assert stream.position == 1


def test_a_character_that_a_dead_end_cuts_short_comes_out_as_one_that_says_so():
    pieces = generate(
        Task(Letters(1, b"\xe2", end=False), TOKENIZER, STUCK),
        ["a"],
        lambda _: Stream(0, "inference"),
    )
    assert [(piece.token_id, piece.text) for piece in pieces] == [(0xE2, ""), (None, "\ufffd")]


def test_rules_that_leave_nothing_only_together_are_named_together_and_no_other():
    policy = Policy(
        no_repeat_ngram_size=1,
        suppress_tokens=[*range(97)],
        min_new_tokens=9,
        frequency_penalty=0.5,
        temperature=0,
    )
    with pytest.raises(DeadEndError) as caught:
        policy.choose(np.zeros(257), [*range(97, 256)], prompt_length=159)
    assert str(caught.value) == (
        "no_repeat_ngram_size=1, suppress_tokens and min_new_tokens=9 together leave no token to "
        "choose from; loosen one or leave it out"
    )


def test_a_number_too_long_to_show_is_named_in_one_line():
    policy = Policy(min_new_tokens=10**5000, suppress_tokens=[0])
    with pytest.raises(DeadEndError, match="and min_new_tokens=a number too long to show together"):
        policy.choose(np.where((np.arange(257) % 256) == 0, 0.0, NEVER))


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": -1e308},
        {"frequency_penalty": 1e308, "presence_penalty": -1e308, "repetition_penalty": 1e-320},
        {"logit_bias": {97: 1e308}, "repetition_penalty": 1e-9},
        {"frequency_penalty": 1e308},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_penalty_that_overflows_is_named_and_never_the_weights(options, temperature):
    policy = Policy(**options, temperature=temperature)
    text = texts(Letters(1, b"a", end=False), ["aa"], policy)[0]
    assert (text.finish_reason, text.token_ids) == ("dead_end", [])
    assert "(which overflows)" in text.explanation
    assert any(f"{name}" in text.explanation for name in options)
    assert "weights" not in text.explanation


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_model_that_is_broken_is_an_error_and_no_dead_end(broken):
    model = Letters(1)
    model.table[:, 97] = broken
    with pytest.raises(MinigenError, match="check the weights"):
        texts(model, ["x"], STUCK)


def random_policy(words):
    """Any policy, most of them with rules that soon leave nothing."""
    pick = lambda *values: values[words.integers(1, len(values))[0]]  # noqa: E731
    return Policy(
        temperature=0,
        no_repeat_ngram_size=pick(None, 1, 2, 2, 3),
        min_new_tokens=pick(0, 0, 4, 100),
        suppress_tokens=pick((), (END_OF_TEXT,), (97, END_OF_TEXT), (98,)),
        frequency_penalty=pick(0.0, 0.0, 0.5, -1e308),
        repetition_penalty=pick(1.0, 1.0, 1.5),
        logit_bias=pick({}, {END_OF_TEXT: 3.0}, {99: -1.0}),
    )


def test_greedy_speculation_is_greedy_generation_in_2000_cases_with_dead_ends():
    reasons = dict.fromkeys(get_args(FinishReason), 0)
    models = [Letters(seed) for seed in range(8)]
    for case in range(2000):
        words = Stream(case, "case")
        model, draft = (models[i] for i in words.integers(2, len(models)))
        policy, prompt = random_policy(words), ["", "a", "zb", "abcab"][words.integers(1, 4)[0]]
        options = {
            "max_new_tokens": int(words.integers(1, 8)[0]) + 1,
            "stop": [(), "ca", ("bb", "a")][words.integers(1, 3)[0]],
        }
        task = Task(model, TOKENIZER, policy, **options)
        expected = complete(generate(task, [prompt]))
        count = int(words.integers(1, 5)[0]) + 1
        pieces = speculate(task, draft, TOKENIZER, [prompt], num_draft_tokens=count)
        got = complete(pieces)
        for a, b in zip(got, expected, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.explanation) == (
                b.token_ids,
                b.text,
                b.finish_reason,
                b.explanation,
            ), (case, policy, options)
            reasons[a.finish_reason] += 1
    assert min(reasons.values()) > 100


def test_a_draft_in_a_dead_end_stops_proposing_and_the_target_is_asked_for_what_is_needed():
    table = np.full((257, 257), NEVER)
    table[:, [*b"ab"]] = [0.0, 1.0]
    model = Letters(0)
    model.table = table
    policy = Policy(temperature=0, no_repeat_ngram_size=2)
    task = Task(model, TOKENIZER, policy, max_new_tokens=3)
    plain = complete(generate(task, ["zb"]))[0]
    drafted = complete(speculate(task, model, TOKENIZER, ["zb"]))[0]
    assert plain.text == drafted.text == "bab"
    assert plain.finish_reason == drafted.finish_reason == "length"


def test_sampled_speculation_ends_in_a_dead_end_too():
    pair = Stream(0, "inference/draft"), Stream(0, "inference/accept")
    task = Task(LETTERS, TOKENIZER, STUCK)
    pieces = speculate(task, LETTERS, TOKENIZER, ["abc"], lambda _: pair)
    text = complete(pieces)[0]
    assert (text.finish_reason, sorted(text.text)) == ("dead_end", [*"defgh"])
    assert text.acceptance_rate == 1.0
    nothing = speculate(task, LETTERS, TOKENIZER, ["abcdefgh"], lambda _: pair)
    assert complete(nothing)[0].acceptance_rate == 0.0
    one = speculate(task, LETTERS, TOKENIZER, ["abcdefg"], lambda _: pair, num_draft_tokens=1)
    assert complete(one)[0].acceptance_rate == 1.0


# ---- Beams


def exhaustive(table, policy, length, length_penalty, end):
    """Every finished text with its score, best first; where there is none, the best dead end."""
    finished, dead = {}, {}
    log_p = head.log_softmax(table)

    def follow(tokens, total):
        score = total / max(1, len(tokens)) ** length_penalty
        if tokens and (tokens[-1] == end or len(tokens) == length):
            finished[tokens] = score
            return
        history = policy.history([[0, *tokens]], len(table), new_tokens=len(tokens))
        z, stuck = policy.adjust(log_p[[(0, *tokens)[-1]]], history)
        if stuck is not None:
            dead[tokens] = score
            return
        for token in np.flatnonzero(z[0] > NEVER).tolist():
            follow((*tokens, token), total + float(z[0, token]))

    follow((), 0.0)
    return sorted((finished or dead).items(), key=lambda text: -text[1]), bool(finished)


def test_beams_find_what_trying_every_text_finds_with_dead_ends_among_them():
    kinds = {True: 0, False: 0}
    for case, size in product(range(60), (1, 2)):
        words = Stream(case, f"beams {size}")
        table = words.uniforms(9).reshape(3, 3) * 6.0 - 3.0
        table[words.integers(1, 3)[0], words.integers(1, 3)[0]] = NEVER
        options = {"no_repeat_ngram_size": size, "presence_penalty": 0.5}
        ends = bool(words.integers(1, 2)[0])
        length = 2 * size + int(words.integers(1, 3)[0])
        policy = Policy(**options, suppress_tokens=(2,) * ends)
        expected, is_finished = exhaustive(table, policy, length, 0.7, end=2)
        policy = Policy(**options, suppress_tokens=(END_OF_TEXT,) * ends)
        task = Task(Bigrams(table, end=2), TOKENIZER, policy, length)
        found = beam_search(task, b"\0", num_beams=3**6, length_penalty=0.7)
        scores = dict(expected)
        assert len(found) == (len(scores) if is_finished else 1)
        for text, (_, best) in zip(found, expected, strict=False):
            assert text.score == pytest.approx(best, abs=1e-9)
            tokens = tuple(min(token, 2) for token in text.token_ids)
            assert text.score == pytest.approx(scores[tokens], abs=1e-9)
            assert (text.finish_reason != "dead_end") == is_finished
        kinds[is_finished] += 1
    assert min(kinds.values()) > 10


def test_where_all_beams_die_the_best_dead_one_is_the_result_and_says_so():
    text, *others = beam_search(
        Task(LETTERS, TOKENIZER, STUCK, max_new_tokens=50), "abc", num_beams=4
    )
    assert not others
    assert (text.finish_reason, sorted(text.text)) == ("dead_end", [*"defgh"])
    assert text.explanation.startswith("no_repeat_ngram_size=1 leaves no token")
    at_once = beam_search(Task(LETTERS, TOKENIZER, STUCK), "abcdefgh", num_beams=4)[0]
    assert (at_once.finish_reason, at_once.text, at_once.score) == ("dead_end", "", 0.0)


@pytest.mark.parametrize("penalty", [-1e308, -8e307, 1e308])
def test_beams_whose_penalties_overflow_die(penalty):
    policy = Policy(frequency_penalty=penalty)
    text = beam_search(
        Task(Letters(1, b"a", end=False), TOKENIZER, policy, max_new_tokens=9), "a", num_beams=2
    )[0]
    assert text.finish_reason == "dead_end"
    assert "overflow" in text.explanation or "beyond the largest float" in text.explanation


# ---- Training


def test_a_run_whose_every_sample_is_a_dead_end_is_the_run_without_samples():
    sizes = {
        "tokenizer.vocab_size": 257,
        "model.embedding_dim": 4,
        "training.batch_size": 16,
        "training.steps": 6,
        "evaluation.every": 0,
    }
    for rule in (
        {"sampling.frequency_penalty": -1e308},
        {"sampling.suppress_tokens": [*range(257)]},
    ):
        run = Run(Config.load("fables", {**sizes, "sampling.every": 1, **rule}))
        records = run.train()
        assert all(one.sample_line()["finish_reason"] == "dead_end" for one in records)
        assert all(next(iter(rule)).split(".")[1] in one.sample.explanation for one in records)
        without = Run(Config.load("fables", {**sizes, "sampling.every": 0}))
        without.train()
        assert run.fingerprint == without.fingerprint


def test_the_rules_of_one_text_are_named_whatever_its_neighbours_may_still_say():
    policy = Policy(presence_penalty=0.5, no_repeat_ngram_size=1)
    history = policy.history([[0, 1, 2], [0], [0, 1, 2]], 3)
    logits = np.zeros((3, 3))
    _, dead = policy.adjust(logits, history)
    assert dead.tolist() == [True, False, True]
    for row in (0, 2):
        named = str(policy.dead_end(logits, history, row))
        assert named.startswith("no_repeat_ngram_size=1 leaves no token")
