"""The output head: the lesson's numbers, invariances, errors, integer weights at their bounds."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import exact_sum, exp, log
from minigen.exact.streams import Stream
from minigen.model.head import (
    gradient_bits,
    integer_gradient,
    integer_weights,
    log_softmax,
    loss_and_gradient,
    project,
    softmax,
    total_loss,
    weight_bits,
)
from minigen.model.model import Model

INF, NAN = float("inf"), float("nan")
LESSON = [0.0, float(log(2.0)), float(log(3.0))]
VOCABULARIES = [1, 2, 3, 257, 512, 1000, 1024, 65536]

logit_rows = st.lists(st.floats(-40.0, 40.0), min_size=1, max_size=9).map(np.array)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


# the lesson's numbers


def test_logits_0_ln2_ln3_have_probabilities_1_2_3_sixths():
    assert softmax(LESSON) == pytest.approx([1 / 6, 1 / 3, 1 / 2], abs=1e-15)
    assert exp(log_softmax(LESSON)) == pytest.approx([1 / 6, 1 / 3, 1 / 2], abs=1e-15)


def test_loss_of_the_best_of_0_ln2_ln3_is_ln2_and_its_gradient_p_minus_one_hot():
    loss, gradient = loss_and_gradient(LESSON, 2)
    assert loss == pytest.approx(0.6931471805599453, abs=1e-15)
    assert gradient == pytest.approx([1 / 6, 1 / 3, -1 / 2], abs=1e-15)


def test_equal_logits_cost_ln_of_their_number_and_have_an_exact_gradient():
    loss, gradient = loss_and_gradient(np.zeros(256), 7)
    assert loss == pytest.approx(float(log(256.0)), abs=1e-15)
    assert gradient.tolist() == [1 / 256 - (i == 7) for i in range(256)]


def test_one_logit_is_certain():
    loss, gradient = loss_and_gradient([-3.5], 0)
    assert loss == 0.0
    assert gradient.tolist() == [0.0]


@given(logit_rows, st.data())
def test_loss_and_gradient_are_those_of_mpmath(z, data):
    target = data.draw(st.integers(0, len(z) - 1))
    loss, gradient = loss_and_gradient(z, target)
    with mpmath.workprec(120):
        e = [mpmath.exp(mpmath.mpf(float(x))) for x in z]
        total = mpmath.fsum(e)
        assert abs(loss + mpmath.log(e[target] / total)) < 1e-13
        for i, found in enumerate(gradient):
            assert abs(float(found) - (e[i] / total - (i == target))) < 1e-14


# invariances and large numbers


@given(logit_rows, st.integers(-1000, 1000))
def test_a_shift_of_all_logits_changes_no_bit_where_the_shift_itself_is_exact(z, shift):
    z = np.rint(z * 2.0**30) * 2.0**-30
    assert softmax(z + shift).tobytes() == softmax(z).tobytes()
    assert log_softmax(z + shift).tobytes() == log_softmax(z).tobytes()


def test_a_row_is_the_same_alone_in_any_batch_and_in_any_layout():
    z = generator(1).normal(scale=5.0, size=(7, 257))
    whole, (w, S) = log_softmax(z), integer_weights(z)
    assert S.shape == (7, 1)
    for i in range(7):
        assert log_softmax(z[i]).tobytes() == whole[i].tobytes()
        assert integer_weights(z[i])[0].tobytes() == w[i].tobytes()
        assert integer_weights(z[i])[1].tolist() == S[i].tolist()
    assert log_softmax(np.asfortranarray(z)).tobytes() == whole.tobytes()
    assert log_softmax(z[::-2, None]).tobytes() == whole[::-2].tobytes()


def test_the_order_of_the_vocabulary_changes_no_bit():
    z = generator(2).normal(scale=5.0, size=257)
    shuffled = generator(3).permutation(257)
    assert log_softmax(z[shuffled]).tobytes() == log_softmax(z)[shuffled].tobytes()
    assert integer_weights(z[shuffled])[1] == integer_weights(z)[1]


def test_logits_of_plus_and_minus_1000_give_no_nan_and_a_finite_loss():
    assert log_softmax([1000.0, -1000.0]).tolist() == [0.0, -2000.0]
    assert softmax([1000.0, -1000.0]).tolist() == [1.0, 0.0]
    loss, gradient = loss_and_gradient([1000.0, -1000.0], 1)
    assert loss == 2000.0
    assert gradient.tolist() == [1.0, -1.0]


def test_the_largest_and_smallest_floats_give_no_nan():
    largest = float(np.finfo(np.float64).max)
    assert log_softmax([largest, -largest]).tolist() == [0.0, -INF]
    assert softmax([largest, -largest]).tolist() == [1.0, 0.0]
    assert softmax([5e-324, -5e-324]).tolist() == [0.5, 0.5]


def test_a_certain_token_has_log_probability_plus_zero():
    assert not np.signbit(log_softmax([0.0, -INF])[0])


def test_minus_infinity_means_never():
    z = [2.0, -INF, 2.0]
    assert softmax(z).tolist() == [0.5, 0.0, 0.5]
    assert log_softmax(z)[1] == -INF
    loss, gradient = loss_and_gradient(z, 1)
    assert loss == INF
    assert gradient.tolist() == [0.5, -1.0, 0.5]


def test_a_token_30_nats_below_has_weight_0_and_a_finite_log_probability():
    z = np.zeros(257)
    z[3] = -31.0
    w, S = integer_weights(z)
    assert w[3] == 0
    assert S == 256 * 2.0**43
    assert log_softmax(z)[3] == pytest.approx(-31.0 - float(log(256.0)), abs=1e-14)


# errors


@pytest.mark.parametrize(
    ("logits", "cause"),
    [
        ([-INF, -INF], "all are -inf"),
        ([0.0, NAN], "one is nan"),
        ([NAN, INF], "one is nan"),
        ([NAN, -INF], "one is nan"),
        ([1.0, INF, 2.0], "one is inf"),
        ([[0.0, 1.0], [NAN, 0.0]], "one is nan"),
        ([[0.0, 1.0], [-INF, -INF]], "all are -inf"),
    ],
)
@pytest.mark.parametrize("function", [log_softmax, softmax, lambda z: integer_weights(np.array(z))])
def test_logits_without_a_finite_largest_value_are_refused_with_the_cause(function, logits, cause):
    with pytest.raises(MinigenError, match=rf"finite largest value \({cause}\)"):
        function(logits)


@pytest.mark.parametrize("logits", [[], 1.0, np.empty((3, 0))])
def test_no_logits_at_all_are_refused(logits):
    with pytest.raises(MinigenError, match=r"^logits must hold at least one number "):
        log_softmax(logits)


@pytest.mark.parametrize("target", [-1, 3])
def test_a_target_outside_the_logits_is_refused(target):
    told = rf"^target must be an index of the logits, below 3 \(got {target}\)$"
    with pytest.raises(OptionError, match=told):
        loss_and_gradient(LESSON, target)


def test_a_target_between_two_logits_is_refused():
    with pytest.raises(OptionError, match=r"^target must be a whole number \(got 1\.5\)$"):
        loss_and_gradient(LESSON, 1.5)


def test_a_batch_is_no_logit_vector():
    with pytest.raises(OptionError, match=r"got shape \(1, 3\)"):
        loss_and_gradient([LESSON], 1)


def test_arguments_are_left_as_they_were():
    z = np.array(LESSON)
    z.flags.writeable = False
    loss_and_gradient(z, 1)
    assert z.tolist() == LESSON
    assert loss_and_gradient([0, 1], np.int64(1))[0] == loss_and_gradient([0.0, 1.0], 1)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, np.uint8, np.int64, np.float32])
def test_logits_of_any_type_are_read_as_float64(kind):
    z = [3, 1, 2] if kind is list else np.array([3, 1, 2], dtype=kind)
    for function in (softmax, log_softmax, lambda z: loss_and_gradient(z, 1)[1]):
        got, right = function(z), function([3.0, 1.0, 2.0])
        assert (got.dtype, got.tolist()) == (np.float64, right.tolist())


# projection


@pytest.mark.parametrize(
    ("vocab_size", "context_length", "embedding_dim"),
    [(257, 8, 32), (257, 1, 1), (257, 8, 64), (1024, 3, 5), (257, 3, 200)],
)
def test_projection_is_the_models_table_bit_for_bit(vocab_size, context_length, embedding_dim):
    model = Model(vocab_size, context_length, embedding_dim)
    model.initialize(Stream(0, "init"))
    W, b = model.parameters["W"], model.parameters["b"]
    b[...] = Stream(1, "init").uniforms(vocab_size) - 0.5
    model.changed()
    contexts = Stream(2, "init").integers(20 * context_length, vocab_size).reshape(20, -1)
    logits = model.logits(contexts)
    hidden = model.hidden(contexts)
    assert hidden.shape == (20, context_length * embedding_dim)
    assert project(hidden, W, b).tobytes() == logits.tobytes()
    assert project(hidden[3], W, b).tobytes() == logits[3].tobytes()
    flat = W.transpose(1, 0, 2).reshape(-1, vocab_size)  # (D, K, V) -> (K·D, V)
    assert project(hidden, flat, b).tobytes() == logits.tobytes()


def test_projection_is_the_models_table_where_the_largest_embedding_rounds_up_to_its_limit():
    model = Model(257, 2, 4)
    model.initialize(Stream(0, "init"))
    model.parameters["E"][5, 1] = 1 - 2.0**-30
    model.changed()
    contexts = np.array([[5, 6], [7, 5], [7, 7]])
    found = project(model.hidden(contexts), model.parameters["W"], model.parameters["b"])
    assert found.tobytes() == model.logits(contexts).tobytes()


def test_projection_is_the_plain_product_to_the_grids_accuracy():
    rng = generator(4)
    h, W, b = rng.normal(size=(9, 96)), rng.normal(size=(96, 257)), rng.normal(size=257)
    error = np.abs(project(h, W, b) - (h @ W + b)).max()
    # each of 96 products is off by half a unit of either operand: 2^-22 of 4 at worst
    assert 0 < error < 96 * 4.5 * 4.5 * 2.0**-22
    assert error < 2e-5


def test_projection_of_numbers_of_another_type_is_that_of_their_values():
    stream = Stream(0, "test")
    h, W, b = (stream.uniforms(n).astype(np.float32) for n in (300, 300 * 7, 7))
    h, W = h.reshape(1, 300), W.reshape(300, 7)
    wide = project(*(x.astype(np.float64) for x in (h, W, b)))
    assert project(h, W, b).tobytes() == wide.tobytes()


def test_projection_of_whole_numbers_is_exact():
    h, W, b = [[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]], [1, 0, -1]
    assert project(h, W, b).tolist() == [[22.0, 24.0, 26.0], [48.0, 54.0, 60.0]]
    assert project(h[0], W, b).tolist() == [22.0, 24.0, 26.0]


@pytest.mark.parametrize(
    ("h", "W", "b"),
    [((2, 3), (4, 5), (5,)), ((2, 4), (4, 5), (4,)), ((4,), (4,), (4,)), ((), (4, 5), (5,))],
)
def test_projection_names_shapes_that_do_not_fit(h, W, b):
    with pytest.raises(OptionError, match=r"^project takes h \(N, H\), W \(H, V\) and b \(V,\) "):
        project(np.ones(h), np.ones(W), np.ones(b))


@pytest.mark.parametrize("culprit", [NAN, INF, 2.0**400])
def test_projection_refuses_operands_outside_the_grids_range(culprit):
    with pytest.raises(MinigenError, match=r"^magnitudes must be finite and below"):
        project([1.0, culprit], np.ones((2, 3)), np.zeros(3))


# integers at their bounds


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_sum_of_weights_is_exact_with_every_weight_at_its_limit(vocab_size):
    w, S = integer_weights(np.full(vocab_size, 3.25))
    assert set(w.tolist()) == {2.0 ** weight_bits(vocab_size)}
    assert int(S[0]) == vocab_size * 2 ** weight_bits(vocab_size) <= 2**52


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_sum_of_weights_is_that_of_python_integers(vocab_size):
    w, S = integer_weights(-generator(vocab_size).exponential(0.5, vocab_size))
    assert int(S[0]) == sum(int(x) for x in w)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 256, 1000, 1025, 16384, 2**21])
@pytest.mark.parametrize("context_length", [1, 3, 4, 16])
def test_the_gradients_integers_stay_within_their_bits(size, context_length):
    q, a = gradient_bits(size, context_length)
    assert size * context_length * 3 * 2 ** (q + a) <= 3 * 2**51 < 2**53
    assert 2 * size * context_length * 2 ** (q + a) > 2**49  # and not a bit too few
    assert q - a in (6, 7)
    w, S = integer_weights(generator(5).normal(scale=9.0, size=(50, 257)))
    d = integer_gradient(w, 2.0**q / S)
    assert np.array_equal(d, np.rint(d))
    assert d.min() >= 0
    assert d.max() <= 2**q
    assert (exact_sum(d, axis=1) <= 2 * 2**q).all()
    exact = [Fraction(int(x)) * 2**q / int(S[0, 0]) for x in w[0]]
    assert all(abs(int(x) - y) <= 1 for x, y in zip(d[0], exact, strict=True))


def test_the_gradients_bits_are_those_of_the_design():
    assert gradient_bits(256, 4) == (24, 17)
    assert gradient_bits(1024, 8) == (22, 16)
    assert gradient_bits(16384, 8) == (20, 14)


@pytest.mark.parametrize(("size", "context_length"), [(2**21, 16), (2**20, 32), (2**20 - 1, 32)])
def test_a_step_may_be_as_large_as_ten_bits_for_weights_and_sixteen_for_d_allow(
    size, context_length
):
    assert gradient_bits(size, context_length) == (16, 10)
    with pytest.raises(
        OptionError, match=r"^batch_size and context_length must leave .* \(got \d+ and \d+, which"
    ):
        gradient_bits(size, 2 * context_length)
    with pytest.raises(OptionError, match=r"leave 9 and 16\): ⌈log₂ batch_size⌉ \+ .* can be 25$"):
        gradient_bits(2 * size, context_length)


def test_losses_add_up_as_integers_of_2_to_the_minus_32_nats():
    losses = [1.0, 2.5, 0.25 * 2.0**-32, 0.75 * 2.0**-32]
    assert [total_loss(np.array([loss])) for loss in losses] == [2**32, 5 * 2**31, 0, 1]
    assert total_loss(np.array(losses)) == 2**32 + 5 * 2**31 + 1
    assert total_loss(np.empty(0)) == 0


def test_the_largest_losses_of_the_largest_batch_add_up_exactly():
    largest = float(np.nextafter(4096.0, 0.0))
    assert total_loss(np.full(2**21, largest)) == 2**21 * round(largest * 2**32) > 2**63


@pytest.mark.parametrize("loss", [4096.0, INF, NAN])
def test_a_loss_without_bound_is_refused(loss):
    with pytest.raises(MinigenError, match=r"^a loss must stay below 4096 nats \(got "):
        total_loss(np.array([1.0, loss]))


def test_a_sure_token_costs_nothing_and_no_negative_zero():
    for logits in ([1.0], [1.0, -1e300]):
        assert str(loss_and_gradient(logits, 0)[0]) == "0.0"
