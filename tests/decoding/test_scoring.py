"""Scores obey the chain rule; evaluations say what plain counting and averaging say."""

import json
from collections import Counter
from itertools import pairwise
from math import exp, log, prod
from pathlib import Path

import numpy as np
import pytest

from minigen.decoding import generation, scoring
from minigen.decoding.generation import log_probabilities, padded_contexts
from minigen.decoding.scoring import entropy, evaluate, mean_loss, score, summarize
from minigen.errors import MinigenError, OptionError
from minigen.exact.streams import Stream
from minigen.model import head
from minigen.model.model import Model
from minigen.text import corpus
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer

VECTOR = json.loads((Path(__file__).parents[1] / "data" / "decoding.json").read_text())["scoring"]
TOKENIZER = ByteTokenizer()
TEXT = "The fox — “sly” — met the crow. " * 20 + "And the cheese fell.\n"


def small_model(context_length=3):
    model = Model(257, context_length, 8)
    model.initialize(Stream(5, "init"))
    model.parameters["W"] *= 8.0
    model.changed()
    return model


def tokens_of(*documents):
    return corpus.from_memory(list(documents)).training


class Halves:
    """A fake model: first `a` with probability 1/2, then `b` with 1/4."""

    vocab_size, context_length = 257, 2

    def logits(self, contexts):
        z = np.full((len(contexts), 257), -np.inf)
        z[:, ord("a")] = z[:, ord("c")] = 0.0
        second = contexts[:, -1] == ord("a")
        z[second, ord("b")] = z[second, ord("d")] = 0.0
        return z


def test_a_sequence_of_conditionals_one_half_and_one_quarter_has_probability_one_eighth():
    result = score(Halves(), TOKENIZER, "ab")
    assert np.exp(result.log_probabilities) == pytest.approx([1 / 2, 1 / 4], rel=1e-14)
    assert result.probability == pytest.approx(1 / 8, rel=1e-14)
    assert result.total_nats == pytest.approx(log(8), rel=1e-14)


def test_figures_are_those_of_the_reference():
    log_p = np.log(VECTOR["token_probs"])
    result = summarize([1, 2, 3, 4], log_p, sum(VECTOR["token_bytes"]))
    for name in ("total_nats", "perplexity", "bits_per_byte"):
        assert getattr(result, name) == pytest.approx(VECTOR[name], abs=1e-9)
    assert result.probability == pytest.approx(prod(VECTOR["token_probs"]), abs=1e-9)


def test_each_token_is_scored_given_those_before_it():
    model, ids = small_model(), [*"sly é".encode()]
    expected = [
        head.log_softmax(model.logits(padded_contexts([ids[:i]], 3))[0])[token]
        for i, token in enumerate(ids)
    ]
    result = score(model, TOKENIZER, "sly é")
    assert result.log_probabilities == expected
    assert (result.token_ids, result.bytes) == (ids, 6)


def test_bytes_are_counted_and_not_tokens():
    tokenizer = ByteTokenizer([(104, 105)])
    model = Model(258, 2, 4)
    result = score(model, tokenizer, "hihi!")
    assert (len(result.token_ids), result.bytes) == (3, 5)
    assert result.perplexity == pytest.approx(258)
    assert result.bits_per_byte == pytest.approx(3 * np.log2(258) / 5)


def test_a_text_that_cannot_be_has_probability_zero():
    result = score(Halves(), TOKENIZER, "az")
    assert (result.log_probabilities[1], result.probability) == (-np.inf, 0.0)
    assert result.total_nats == result.perplexity == result.bits_per_byte == np.inf


@pytest.mark.parametrize("text", ["", b""])
def test_an_empty_text_has_no_score(text):
    with pytest.raises(OptionError, match=r"must hold at least one byte \(got 0 bytes\)"):
        score(small_model(), TOKENIZER, text)


def test_sums_are_the_same_in_any_order():
    nats = Stream(0, "nats").uniforms(999) * 30
    assert scoring.in_units(nats) == scoring.in_units(np.sort(nats))
    halves = scoring.in_units(nats[:400]) + scoring.in_units(nats[400:])
    assert scoring.in_units(nats) == halves
    assert scoring.in_units(np.array([1.0, 2.0**-48, 2.0**-50])) == 2**48 + 1


def test_the_loss_is_the_mean_over_all_predictions_end_of_text_included():
    tokens = tokens_of("ab", "c")  # targets: a b END c END
    model = small_model()
    contexts, targets = tokens.contexts_and_targets(np.arange(5), 3)
    assert targets.tolist() == [97, 98, END_OF_TEXT, 99, END_OF_TEXT]
    log_p = head.log_softmax(model.logits(contexts))
    expected = -np.mean([row[y] for row, y in zip(log_p, targets, strict=True)])
    result = evaluate(model, tokens)
    assert result.loss == pytest.approx(expected, rel=1e-13)
    assert (result.tokens, result.bytes) == (5, 3)
    assert result.perplexity == pytest.approx(exp(expected))
    assert result.bits_per_byte == pytest.approx(5 * expected / log(2) / 3)
    assert mean_loss(model, tokens) == result.loss


def test_entropy_is_the_mean_surprise_and_zero_where_one_token_is_certain():
    assert entropy(np.array([0.5, 0.25, 0.25, 0.0])) == pytest.approx(1.5 * log(2), rel=1e-14)
    assert entropy(np.full(257, 1 / 257)) == pytest.approx(log(257), rel=1e-12)
    assert str(entropy(np.array([0.0, 1.0]))) == "0.0"


def test_a_loss_is_the_exact_sum_of_what_each_token_costs():
    tokens, model = tokens_of("a"), small_model()
    (log_p,) = log_probabilities(model, tokens)
    expected = scoring.in_units(-log_p) / 2.0**48 / 2
    assert (evaluate(model, tokens).loss, mean_loss(model, tokens)) == (expected, expected)


def test_blocks_change_no_bit(monkeypatch):
    tokens, model = tokens_of(TEXT, "Another one."), small_model()
    whole = evaluate(model, tokens), mean_loss(model, tokens)
    monkeypatch.setattr(generation, "_BLOCK", 7 * 257)
    assert (evaluate(model, tokens), mean_loss(model, tokens)) == whole


@pytest.mark.parametrize("block", [1, 5, 1000])
def test_baselines_are_the_entropies_of_the_counts_in_blocks_of_any_size(block, monkeypatch):
    monkeypatch.setattr("minigen.text.corpus.BLOCK", block)
    documents = [TEXT.encode(), b"Another\0one."]
    bytes_and_ends = [256, *documents[0], 256, *documents[1], 256]
    pairs = Counter(pairwise(bytes_and_ends))
    after = Counter(bytes_and_ends[1:])
    before = Counter(bytes_and_ends[:-1])
    n = len(bytes_and_ends) - 1
    baselines = evaluate(small_model(), tokens_of(*documents)).baselines
    assert baselines["uniform"] == pytest.approx(log(257), rel=1e-15)
    unigram = -sum(c * log(c / n) for c in after.values()) / n
    assert baselines["unigram"] == pytest.approx(unigram, rel=1e-12)
    bigram = -sum(c * log(c / before[a]) for (a, _), c in pairs.items()) / n
    assert baselines["bigram"] == pytest.approx(bigram, rel=1e-12)


class Confident:
    """A fake model that gives one token, always the same, a probability of its choice."""

    vocab_size, context_length = 257, 1

    def __init__(self, token, probability):
        self.z = np.log(np.full(257, (1 - probability) / 256))
        self.z[token] = log(probability)

    def logits(self, contexts):
        return np.tile(self.z, (len(contexts), 1))


def test_calibration_error_is_confidence_minus_accuracy():
    tokens = tokens_of("aaab")  # 5 predictions, 3 of them `a`
    result = evaluate(Confident(ord("a"), 0.9), tokens)
    assert result.calibration_error == pytest.approx(0.9 - 0.6, abs=1e-9)
    used = [(i, b) for i, b in enumerate(result.reliability) if b.count]
    assert len(result.reliability) == 15
    assert [(i, b.count) for i, b in used] == [(13, 5)]  # (13/15, 14/15] holds 0.9
    assert used[0][1].confidence == pytest.approx(0.9, abs=1e-9)
    assert used[0][1].accuracy == pytest.approx(0.6, abs=1e-9)
    empty = [b for b in result.reliability if not b.count]
    assert {(b.confidence, b.accuracy) for b in empty} == {(0.0, 0.0)}


class SureOfTheFirst(Confident):
    """A fake model that gives all tokens but the first one probability."""

    def logits(self, contexts):
        return np.where(contexts == END_OF_TEXT, self.z, 0.0)


def test_a_bin_of_one_prediction_has_its_confidence():
    bins = evaluate(SureOfTheFirst(ord("a"), 0.9), tokens_of("a")).reliability
    assert [(i, b.count, b.accuracy) for i, b in enumerate(bins) if b.count] == [
        (0, 1, 0.0),
        (13, 1, 1.0),
    ]
    assert (bins[0].confidence, bins[13].confidence) == pytest.approx((1 / 257, 0.9), abs=1e-9)


def test_the_calibration_error_is_the_papers_over_all_bins():
    tokens, model = tokens_of(TEXT), small_model()
    contexts, targets = tokens.contexts_and_targets(np.arange(len(tokens)), 3)
    p = head.softmax(model.logits(contexts))
    top, right = p.max(axis=1), p.argmax(axis=1) == targets
    expected, used = 0.0, 0
    for i in range(15):
        inside = (top > i / 15) & (top <= (i + 1) / 15)
        if inside.any():
            used += 1
            expected += inside.mean() * abs(right[inside].mean() - top[inside].mean())
    assert used > 1
    result = evaluate(model, tokens)
    assert result.calibration_error == pytest.approx(expected, rel=1e-9)
    assert sum(b.count for b in result.reliability) == len(tokens)


class Thirds(Halves):
    """A fake model that is sure of `a`, `b` and `c` alike."""

    def logits(self, contexts):
        z = np.full((len(contexts), 257), -200.0)
        z[:, [*b"abc"]] = 0.0
        return z


def test_a_bin_holds_its_upper_edge():
    used = [b for b in evaluate(Thirds(), tokens_of("aa")).reliability if b.count]
    assert [(b.lowest, b.highest) for b in used] == [(4 / 15, 5 / 15)]


def test_certain_predictions_belong_to_the_last_bin():
    result = evaluate(Confident(ord("a"), 1 - 2**-53), tokens_of("aa"))
    assert result.reliability[-1].count == 3


def test_a_text_without_predictions_is_refused():
    empty = corpus.from_memory("x").validation
    for measure in (evaluate, mean_loss):
        with pytest.raises(MinigenError, match=r"at least one token \(got 0\)") as caught:
            measure(small_model(), empty)
        assert type(caught.value) is MinigenError
