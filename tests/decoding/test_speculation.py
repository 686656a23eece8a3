"""Speculation gives exactly the target's distribution: every outcome counted, in fractions."""

import json
import tracemalloc
from fractions import Fraction
from functools import cache
from itertools import product
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from minigen.decoding.generation import Task, complete, generate
from minigen.decoding.policy import Policy
from minigen.decoding.speculation import (
    Choices,
    acceptance,
    residual,
    speculate,
    speculative_round,
)
from minigen.errors import MinigenError, OptionError
from minigen.exact.streams import Stream
from minigen.model import head
from minigen.model.model import Model
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer
from tests.decoding.test_generation import Reciter

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "decoding.json").read_text())[
    "speculation"
]
P, Q = (np.rint(100 * np.array(VECTORS[name])) for name in "pq")
TOKENIZER = ByteTokenizer()
GREEDY = Policy(temperature=0)


class OnePath:
    """Choices that follow one path through all that could happen, and remember its probability."""

    def __init__(self, path):
        self._path = path
        self.taken = []
        self.untaken = []
        self.probability = Fraction(1)

    def _choose(self, options):
        options = [(value, p) for value, p in options if p]
        turn = self._path[len(self.taken)] if len(self.taken) < len(self._path) else 0
        if len(self.taken) >= len(self._path):
            self.untaken += [[*self.taken, other] for other in range(1, len(options))]
        self.taken.append(turn)
        value, p = options[turn]
        self.probability *= p
        return value

    def propose(self, weights):
        weights = [int(w) for w in weights]
        return self._choose([(i, Fraction(w, sum(weights))) for i, w in enumerate(weights)])

    replace = propose

    def accepts(self, numerator, denominator):
        p = min(Fraction(1), Fraction(numerator, denominator))
        return self._choose([(True, p), (False, 1 - p)])


def every_outcome(run):
    """Run with every possible sequence of choices; yield (probability, result)."""
    paths = [[]]
    while paths:
        choices = OnePath(paths.pop())
        result = run(choices)
        paths += choices.untaken
        yield choices.probability, result


@cache
def weights_after(model, tokens):
    """Small integer weights that depend on the whole text, zeros among them."""
    words = Stream(0, f"{model} {tokens}").integers(3, 5)
    return np.array([words[0] + 1.0, *words[1:]])


def counted(pieces):
    """Tokens of a round, how many proposals were accepted, how many examined."""
    tokens, accepted = zip(*pieces, strict=True)
    return list(tokens), accepted.count(True), len(accepted) - accepted.count(None)


def some_round(text, choices, num_draft_tokens):
    return counted(
        speculative_round(
            lambda proposals: weights_after("draft", (*text, *proposals)),
            lambda proposals: (
                weights_after("target", (*text, *proposals[:i])) for i in range(len(proposals) + 1)
            ),
            choices,
            num_draft_tokens,
        )
    )


@pytest.mark.parametrize(("num_draft_tokens", "length"), [(1, 3), (2, 3), (3, 2)])
def test_texts_have_exactly_the_targets_probabilities(num_draft_tokens, length):
    def run(choices):
        text = ()
        while len(text) < length:
            tokens, _, _ = some_round(text, choices, num_draft_tokens)
            text = (*text, *tokens)
        return text[:length]

    reached = dict.fromkeys(product(range(3), repeat=length), Fraction(0))
    for probability, text in every_outcome(run):
        reached[text] += probability
    for text, probability in reached.items():
        expected = Fraction(1)
        for i, token in enumerate(text):
            weights = weights_after("target", text[:i])
            expected *= Fraction(int(weights[token]), int(weights.sum()))
        assert probability == expected


def one_round(num_draft_tokens):
    return every_outcome(
        lambda choices: counted(
            speculative_round(
                lambda proposals: Q,
                lambda proposals: [P] * (len(proposals) + 1),
                choices,
                num_draft_tokens,
            )
        )
    )


def test_acceptances_and_residual_are_those_of_the_paper():
    ratios = [min(1, Fraction(*acceptance(P, Q, token))) for token in range(4)]
    assert [float(ratio) for ratio in ratios] == pytest.approx(VECTORS["accept"], abs=1e-9)
    rest = residual(P, Q)
    assert [w / sum(rest) for w in rest] == pytest.approx(VECTORS["residual"], abs=1e-9)


def test_a_first_token_is_accepted_with_the_overlap_of_the_distributions():
    rate = sum(p * accepted for p, (_, accepted, _) in one_round(1))
    assert float(rate) == pytest.approx(VECTORS["acceptance_rate"], abs=1e-9)
    assert rate == Fraction(int(np.minimum(P, Q).sum()), 100)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_round_gives_as_many_tokens_as_the_paper_expects(n):
    expected = sum(p * len(tokens) for p, (tokens, _, _) in one_round(n))
    assert float(expected) == pytest.approx(VECTORS["expected_tokens_per_round"][str(n)], abs=1e-9)


def choices_by(*words):
    """Choices of which all but the proposals take the listed words."""
    return Choices(None, iter(words).__next__)


def test_sampled_choices_accept_exactly_the_words_below_the_ratio():
    third = 2**64 // 3  # third < 2^64/3 < third + 1
    choices = choices_by(0, third, third + 1, 2**64 - 1)
    assert [choices.accepts(1, 3) for _ in range(4)] == [True, True, False, False]
    assert choices_by(2**64 - 1).accepts(3, 3)
    assert not choices_by(0).accepts(0, 3)


def test_a_replacement_never_has_a_weight_of_zero():
    words = (0, 2**63 - 1, 2**63, 2**64 - 1)
    for weights in ([0, 1, 0, 1, 0], [0, 2**104, 0, 2**104, 0], [0, 1, 0, 1]):
        choices = choices_by(*words)
        assert [choices.replace(weights) for _ in words] == [1, 1, 3, 3]


def small_model(seed, context_length=4):
    model = Model(257, context_length, 8)
    model.initialize(Stream(seed, "init"))
    model.parameters["W"] *= 8.0
    model.changed()
    return model


def pieces_of(model, draft, prompts, policy, streams=None, **options):
    own = {name: options.pop(name) for name in ["num_draft_tokens"] if name in options}
    task = Task(model, TOKENIZER, policy, **options)
    given = [] if streams is None else [streams.__getitem__]
    return speculate(task, draft, TOKENIZER, prompts, *given, **own)


def run(*arguments, **options):
    return complete(pieces_of(*arguments, **options))


def streams(count=1):
    return [(Stream(0, "inference/draft"), Stream(0, "inference/accept")) for _ in range(count)]


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 50])
@pytest.mark.parametrize(
    "policy",
    [
        GREEDY,
        Policy(top_k=1, no_repeat_ngram_size=2, repetition_penalty=1.3, frequency_penalty=0.2),
        Policy(temperature=0, logit_bias={END_OF_TEXT: 3.0}, min_new_tokens=7),
    ],
    ids=["plain", "penalties", "ending"],
)
def test_greedy_speculation_gives_the_greedy_texts_token_for_token(policy, num_draft_tokens):
    model, prompts = small_model(3), ["", "so", "a much longer prompt"]
    options = {"max_new_tokens": 25, "stop": ["\x00"], "log_probabilities": True}
    expected = complete(generate(Task(model, TOKENIZER, policy, **options), prompts))
    # The target itself, biased: a draft that is right now and then.
    draft = small_model(3)
    draft.parameters["b"][:] = np.linspace(0, 3, 257)
    options["num_draft_tokens"] = num_draft_tokens
    got = run(model, draft, prompts, policy, **options)
    assert [(t.token_ids, t.text, t.finish_reason, t.log_probabilities) for t in got] == [
        (t.token_ids, t.text, t.finish_reason, t.log_probabilities) for t in expected
    ]
    assert any(0 < t.acceptance_rate < 1 for t in got)


def test_a_draft_equal_to_the_target_is_always_accepted():
    policy = Policy(temperature=0.8, top_p=0.9, frequency_penalty=0.3, no_repeat_ngram_size=2)
    for length in (1, 200):
        options = {"max_new_tokens": length}
        text = run(small_model(3), small_model(3), ["so"], policy, streams(), **options)[0]
        assert text.acceptance_rate == 1.0


def test_proposals_take_their_own_stream_and_acceptances_theirs():
    pair = streams()[0]
    policy = Policy(suppress_tokens=[END_OF_TEXT])
    run(small_model(3), small_model(3), [""], policy, [pair], max_new_tokens=10)
    # By default rounds of 4 + 1, 4 + 1 tokens: 8 proposals, 8 acceptances and 2 tokens more.
    assert [stream.position for stream in pair] == [8, 10]


def test_nothing_is_proposed_beyond_the_end_of_a_text():
    draft, accept = streams()[0]
    policy = Policy(suppress_tokens=[END_OF_TEXT])
    options = {"max_new_tokens": 2, "num_draft_tokens": 50}
    run(small_model(3), small_model(3), [""], policy, [(draft, accept)], **options)
    assert draft.position == 2
    pair, options = streams()[0], {"max_new_tokens": 7, "num_draft_tokens": 4}
    run(small_model(3), small_model(3), [""], policy, [pair], **options)
    assert [stream.position for stream in pair] == [4 + 2, 5 + 2]
    policy = Policy(logit_bias={END_OF_TEXT: 3.0})
    text = run(small_model(3), small_model(3), [""], policy, [(draft, accept)], num_draft_tokens=50)
    assert text[0].finish_reason == "end_of_text"
    assert draft.position == 2 + len(text[0].token_ids)


def test_a_text_depends_on_its_prompt_and_streams_alone():
    model, draft, policy = small_model(3), small_model(4, context_length=1), Policy(top_k=40)
    together = run(model, draft, ["a", "b", "a"], policy, streams(3), max_new_tokens=20)
    alone = run(model, draft, ["b"], policy, streams(), max_new_tokens=20)
    assert together[0] == together[2]
    assert together[1] == alone[0]


class Constant:
    """A fake model that always has the same logits."""

    vocab_size, context_length = 257, 1

    def __init__(self, seed):
        self.z = Stream(seed, "logits").uniforms(257) * 4.0
        self.z[END_OF_TEXT] = -np.inf

    def logits(self, contexts):
        return np.tile(self.z, (len(contexts), 1))


def test_the_acceptance_rate_counts_the_proposals_that_were_looked_at():
    target, draft = Reciter(b"abcd"), Reciter(b"abxx")
    text = run(target, draft, [""], GREEDY, max_new_tokens=4)[0]
    assert (text.text, text.acceptance_rate) == ("abcd", 2 / 4)  # ab and not x, then not x


def test_the_acceptance_rate_is_the_overlap_within_its_sampling_error():
    target, draft, n = Constant(1), Constant(2), 1500
    text = run(target, draft, [""], Policy(), streams(), max_new_tokens=n)[0]
    overlap = float(np.minimum(head.softmax(target.z), head.softmax(draft.z)).sum())
    assert 0.2 < overlap < 0.8
    # At least n/2 proposals were examined; 5 standard errors: one seed in a million fails.
    assert abs(text.acceptance_rate - overlap) < 5 * sqrt(overlap * (1 - overlap) / (n / 2))


class Counting:
    """A fake model that is sure of one token: the number of those that it may see and sees."""

    vocab_size = 257

    def __init__(self, context_length):
        self.context_length, self.most, self.rows = context_length, 0, []

    def logits(self, contexts):
        assert contexts.shape[1] == self.context_length
        read = np.add.reduce(contexts != END_OF_TEXT, axis=1)
        self.most = max(self.most, *read.tolist())
        self.rows.append(len(contexts))
        z = np.full((len(contexts), 257), -5.0)
        z[np.arange(len(contexts)), read] = 5.0
        return z


@pytest.mark.parametrize(("own", "its"), [(9, 3), (3, 9), (9, 9)])
def test_target_and_draft_each_see_as_much_of_the_text_as_they_can(own, its):
    target, draft = Counting(own), Counting(its)
    text = run(target, draft, ["ab"], GREEDY, max_new_tokens=12, num_draft_tokens=3)
    assert text[0].token_ids == [min(2 + n, own) for n in range(12)]
    assert (target.most, draft.most) == (own, its)
    assert set(draft.rows) == {1}
    assert target.rows[0] == 3 + 1  # a row before each proposal and one behind them


def test_memory_grows_with_the_proposals_and_not_with_their_square():
    tracemalloc.start()
    try:
        n = 2000
        run(Counting(1), Counting(1), ["ab"], GREEDY, max_new_tokens=n, num_draft_tokens=n)
        # Their distributions, twice, and a pass over them; texts of all lengths would be 16 MB.
        assert tracemalloc.get_traced_memory()[1] < 4 * n * 257 * 8
    finally:
        tracemalloc.stop()


def test_pieces_join_to_the_text_and_end_at_stop_strings():
    policy = Policy(suppress_tokens=[END_OF_TEXT])
    options = {"stop": ["e", "f", "g"], "max_new_tokens": 10**4}
    pieces = list(pieces_of(small_model(3), small_model(4), [""], policy, streams(), **options))
    text = pieces[-1].continuation
    assert text.finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == text.text
    assert [piece.token_id for piece in pieces] == text.token_ids


def test_a_draft_with_another_tokenizer_is_refused():
    other = ByteTokenizer([(104, 105)])
    with pytest.raises(MinigenError, match="a draft must have the tokenizer of its ta") as caught:
        speculate(Task(small_model(3), TOKENIZER, GREEDY), Model(258, 4, 8), other, ["a"])
    assert type(caught.value) is MinigenError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, r"num_draft_tokens must be a whole number, at least 1 \(got 0\)"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be a whole number, at least 1 \(got 0\)"),
    ],
)
def test_a_speculation_that_cannot_be_done_is_refused_before_it_starts(options, message):
    model = small_model(3)
    with pytest.raises(OptionError, match=message):
        pieces_of(model, model, ["a"], GREEDY, **options)


def test_a_policy_that_draws_is_refused_where_no_streams_are_given():
    model = small_model(3)
    with pytest.raises(OptionError, match=r"takes streams for each text \(got none\)"):
        run(model, model, ["a"], Policy())
