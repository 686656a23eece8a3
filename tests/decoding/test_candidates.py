"""The candidates of a decision are the model's logits and the policy's probabilities, in order."""

import numpy as np
import pytest

from minigen.decoding.candidates import decide
from minigen.decoding.policy import OPTIONS, Policy
from minigen.model import head
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer

TOKENIZER = ByteTokenizer()


class Falling:
    """A fake model: a and b are equally likely, then c, then d; what else there is, is nearly
    impossible; of x, whose weight is 0, one may still say how unlikely it is."""

    vocab_size, context_length = 257, 1
    z = np.full(257, -20.0)
    z[[*b"abcdx"]] = 2.0, 2.0, 1.0, -1.0, -60.0

    def logits(self, contexts):
        return np.tile(self.z, (len(contexts), 1))


@pytest.mark.parametrize(
    "policy", [None, Policy(), Policy(temperature=2.0), Policy(top_k=3), Policy(temperature=0.0)]
)
def test_a_decision_is_what_model_and_policy_make_of_each_token(policy):
    decision = decide(Falling(), TOKENIZER, "a", policy, top=4)
    p = (policy or Policy()).probabilities(Falling.z)
    filtered = policy not in (None, Policy())
    order = [token for token in b"abcd" if not filtered or p[token]]
    assert [c.token_id for c in decision.candidates] == order
    for c in decision.candidates:
        assert (c.bytes, c.text) == (bytes([c.token_id]), chr(c.token_id))
        assert (c.logit, c.probability) == (Falling.z[c.token_id], p[c.token_id])
        assert c.negative_log_likelihood == pytest.approx(-np.log(p[c.token_id]), abs=1e-12)
    rest = np.delete(p, order)
    assert decision.others == np.count_nonzero(rest)
    assert decision.others_probability == pytest.approx(rest.sum(), rel=1e-2, abs=2e-12)
    assert decision.others == (0 if policy in (Policy(top_k=3), Policy(temperature=0.0)) else 252)
    assert decision.entropy == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), rel=1e-9)
    assert decision.greedy_token_id == ord("a")


def test_without_filters_a_token_of_weight_0_is_shown_with_its_log_probability():
    last = decide(Falling(), TOKENIZER, "", top=257).candidates[-1]
    assert (last.token_id, last.probability) == (ord("x"), 0.0)
    expected = -head.log_softmax(Falling.z)[ord("x")]
    assert last.negative_log_likelihood == expected == pytest.approx(62.9, abs=0.1)


OFF = {
    **{"logit_bias": {}, "repetition_penalty": 1.0, "frequency_penalty": 0.0},
    **{"presence_penalty": 0.0, "no_repeat_ngram_size": 0, "suppress_tokens": (), "top_k": 10**6},
    **{"min_new_tokens": 0, "temperature": 1.0, "top_n_sigma": 1e300, "top_p": 1.0, "min_p": 0.0},
    **{"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0},
}


@pytest.mark.parametrize("options", [{name: OFF[name]} for name in OPTIONS] + [{"top_k": 0}])
def test_an_option_that_changes_nothing_changes_no_decision(options):
    found = decide(Falling(), TOKENIZER, "a prompt", Policy(**options), top=257)
    assert found == decide(Falling(), TOKENIZER, "a prompt", top=257)


@pytest.mark.parametrize("options", [{"suppress_tokens": [*b"x"]}, {"top_k": 256}])
def test_a_token_that_is_taken_away_is_not_shown_however_unlikely_it_was(options):
    found = decide(Falling(), TOKENIZER, "", Policy(**options), top=257)
    assert len(found.candidates) == 256


def test_greedy_takes_what_the_rules_leave_whatever_the_filters():
    policy = Policy(suppress_tokens=[*b"ab"], top_p=0.5, temperature=3.0)
    assert decide(Falling(), TOKENIZER, "a", policy).greedy_token_id == ord("c")


def test_ten_are_shown_unless_more_are_asked_for():
    assert len(decide(Falling(), TOKENIZER, "a").candidates) == 10


def test_bytes_that_are_no_character_show_as_one_that_says_so():
    sure = Falling()
    sure.z = np.where(np.arange(257) == 0xFF, 9.0, 0.0)
    assert decide(sure, TOKENIZER, "a").candidates[0].text == "\ufffd"


def test_to_a_decision_no_token_of_the_prompt_is_new():
    ending = Falling()
    ending.z = np.where(np.arange(257) == END_OF_TEXT, 9.0, Falling.z)
    for options, greedy in (({}, END_OF_TEXT), ({"min_new_tokens": 1}, ord("a"))):
        decision = decide(ending, TOKENIZER, "a prompt", Policy(**options))
        assert decision.greedy_token_id == decision.candidates[0].token_id == greedy
