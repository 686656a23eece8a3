"""The model: one table behind every way to a logit, statistics that add up, the true gradient."""

import dataclasses
from fractions import Fraction
from functools import reduce
from itertools import combinations
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from minigen.errors import MinigenError, OptionError
from minigen.exact.arithmetic import exact_matmul, exact_sum
from minigen.exact.streams import Stream
from minigen.model import gradient
from minigen.model.gradient import Statistics
from minigen.model.head import gradient_bits, integer_weights, log_softmax, project
from minigen.model.model import Model
from minigen.model.parallel import recycled

SHAPES = [(257, 8, 64), (257, 1, 1), (257, 1, 32), (257, 9, 1), (1024, 3, 5), (2, 2, 2), (1, 1, 1)]


def new_model(vocab_size: int = 257, context_length: int = 3, embedding_dim: int = 5) -> Model:
    """Random parameters, bias included."""
    model = Model(vocab_size, context_length, embedding_dim)
    model.initialize(Stream(0, "init"))
    model.parameters["b"][...] = Stream(1, "init").uniforms(vocab_size) - 0.5
    model.changed()
    return model


def batch(model: Model, size: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Random contexts (N, K) and targets (N,)."""
    K, stream = model.context_length, Stream(seed, "optimizer")
    contexts = stream.integers(size * K, model.vocab_size).reshape(size, K)
    return contexts, stream.integers(size, model.vocab_size)


def assert_same_bits(a: Statistics, b: Statistics) -> None:
    for field in dataclasses.fields(Statistics):
        left, right = np.asarray(getattr(a, field.name)), np.asarray(getattr(b, field.name))
        assert left.shape == right.shape, field.name
        assert left.tobytes() == right.tobytes(), field.name


def plain_loss(parameters: dict[str, np.ndarray], contexts: np.ndarray, y: np.ndarray) -> float:
    """Mean cross-entropy of z = Σₖ E[xₖ]·W[:, k, :] + b in plain float64 numpy."""
    z = np.einsum("nkd,dkv->nv", parameters["E"][contexts], parameters["W"]) + parameters["b"]
    z = z - z.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]))


# parameters


def test_initial_parameters_are_the_streams_words_in_the_order_e_then_w_and_the_bias_is_zero():
    model, stream = Model(257, 3, 5), Stream(0, "init")
    model.initialize(stream)
    E, W, b = (model.parameters[name] for name in ("E", "W", "b"))
    assert (E.shape, W.shape, b.shape) == ((257, 5), (5, 3, 257), (257,))
    uniforms = Stream(0, "init").uniforms(E.size + W.size)
    assert stream.position == len(uniforms)
    assert E.reshape(-1).tolist() == (2 * uniforms[: E.size] - 1).tolist()
    assert W.reshape(-1) == pytest.approx((2 * uniforms[E.size :] - 1) / np.sqrt(15), abs=1e-16)
    assert b.tolist() == [0.0] * 257


def test_parameters_are_views_of_one_flat_array_and_loading_copies():
    model, other = new_model(), Model(257, 3, 5)
    other.load(model.parameters)
    assert other.flat.tobytes() == model.flat.tobytes()
    assert list(other.parameters) == ["E", "W", "b"]
    for parameter in other.parameters.values():
        assert np.shares_memory(parameter, other.flat)
        assert not np.shares_memory(parameter, model.flat)


# logits


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_same_bits_alone_in_any_batch_token_by_token_and_in_training(shape):
    model = new_model(*shape)
    V, K, _ = shape
    contexts, _ = batch(model, 40)
    whole = model.logits(contexts)
    assert whole.shape == (40, V)

    # alone, on a fresh model each, so that no cached row is shared
    for i in range(0, 40, 7):
        assert new_model(*shape).logits(contexts[i : i + 1]).tobytes() == whole[i].tobytes()
    # in another order and another batch
    assert model.logits(contexts[::-1]).tobytes() == whole[::-1].tobytes()
    assert new_model(*shape).logits(contexts[5:11]).tobytes() == whole[5:11].tobytes()

    table, unit = model.table(np.arange(V))  # (V, K, V)
    b = model.parameters["b"]
    # token by token, oldest first, as generation does, and newest first
    for order in (range(K), reversed(range(K))):
        total = np.zeros((40, V))
        for k in order:
            total += table[contexts[:, k], k]
        assert (total * unit + b).tobytes() == whole.tobytes()
    # X·T, as training does
    columns = (contexts * K + np.arange(K)).reshape(-1)
    X = csr_array((np.ones(40 * K), columns, np.arange(0, 40 * K + 1, K)), shape=(40, V * K))
    assert ((X @ table.reshape(V * K, V)) * unit + b).tobytes() == whole.tobytes()
    # (X·E)·W, the lesson's form
    assert project(model.hidden(contexts), model.parameters["W"], b).tobytes() == whole.tobytes()


def test_logits_are_those_of_the_plain_formula_to_the_grids_accuracy():
    model = new_model(257, 8, 64)
    contexts, _ = batch(model, 50)
    E, W, b = (model.parameters[name] for name in ("E", "W", "b"))
    plain = np.einsum("nkd,dkv->nv", E[contexts], W) + b
    assert np.abs(model.logits(contexts) - plain).max() < 5e-6


def test_the_scale_comes_from_all_rows_so_tokens_absent_from_a_batch_matter_and_others_do_not():
    model = new_model()
    contexts = np.array([[1, 2, 3]])
    before = model.logits(contexts)
    model.parameters["E"][200] *= 2.0**20  # never in the batch: the grid is coarser all the same
    model.changed()
    alone = model.logits(contexts)
    assert np.abs(alone - before).max() > 1e-4
    both = model.logits(np.array([[1, 2, 3], [200, 200, 200]]))
    assert both[0].tobytes() == alone[0].tobytes()


def test_logits_follow_the_parameters_once_they_are_said_to_have_changed():
    model = new_model()
    contexts, _ = batch(model, 10)
    model.logits(contexts)
    model.flat *= 0.75
    model.changed()
    fresh = Model(257, 3, 5)
    fresh.load(model.parameters)
    assert model.logits(contexts).tobytes() == fresh.logits(contexts).tobytes()


def test_parameters_that_are_drawn_or_loaded_anew_are_said_to_have_changed():
    other, model = Model(7, 2, 3), Model(7, 2, 3)
    other.initialize(Stream(1, "init"))
    contexts = np.array([[3, 5]])
    model.logits(contexts)
    model.initialize(Stream(1, "init"))
    assert model.logits(contexts).tobytes() == other.logits(contexts).tobytes()
    other.initialize(Stream(2, "init"))
    model.load(other.parameters)
    assert model.logits(contexts).tobytes() == other.logits(contexts).tobytes()


def test_a_model_has_its_own_products_tried(monkeypatch):
    asked = []
    monkeypatch.setattr("minigen.exact.selfcheck.check", lambda *sizes: asked.append(sizes))
    Model(7, 2, 4)
    assert asked == [(8, 7)]


def test_a_table_of_cached_rows_grows_without_changing_any_of_them():
    model, stream = new_model(), Stream(3, "x")
    contexts = stream.integers(300, 257).reshape(100, 3)
    one_by_one = np.concatenate([model.logits(context[None]) for context in contexts])
    assert one_by_one.tobytes() == new_model().logits(contexts).tobytes()


def test_rows_of_tokens_are_kept_from_call_to_call_until_the_parameters_change():
    model, first, then = new_model(257, 2), np.arange(100), np.array([0, *range(100, 257)])
    assert model._kept[2] == 0
    for tokens, kept in ((first, 100), (then, 257)):  # in the end all, for which there is just room
        model.logits(np.column_stack([tokens, tokens]))
        assert model._kept[2] == kept * 2
    rows = model._kept
    model.logits(np.array([[0, 256]]))
    assert model._kept is rows
    model.changed()
    assert model._kept[2] == 0


def test_where_there_is_no_room_for_the_rows_of_a_call_those_of_a_smaller_one_are_kept():
    model = new_model(257, 2)
    model._most_kept = 8
    few, many = np.array([[3, 5], [7, 3]]), np.arange(256).reshape(128, 2)
    for contexts, kept in ((few, 3), (many, 0), (few, 3), (np.array([[0, 1]]), 5)):
        assert model.logits(contexts).tobytes() == new_model(257, 2).logits(contexts).tobytes()
        assert model._kept[2] == kept * 2


def test_a_copy_or_a_pickle_holds_the_weights_once_and_nothing_that_is_derived():
    model = new_model()
    model.logits(np.array([[1, 2, 3]]))
    sizes = {"vocab_size", "context_length", "embedding_dim", "bits", "_offsets", "_most_kept"}
    assert model.__getstate__().keys() == {"flat", *sizes}
    assert repr(model) == "Model(5,397 weights: E (257, 5), W (5, 3, 257), b (257,))"


def test_contexts_of_any_integer_type_and_layout_are_read_and_left_alone():
    model = new_model()
    contexts, targets = batch(model, 12)
    logits, statistics = model.logits(contexts), model.statistics(contexts, targets, 12)
    for variant in (
        contexts.astype(np.uint16),
        contexts.astype(np.int32),
        np.asfortranarray(contexts),
        np.repeat(contexts, 2, axis=0)[::2],
    ):
        y = targets.astype(variant.dtype)
        variant.flags.writeable = y.flags.writeable = False
        assert model.logits(variant).tobytes() == logits.tobytes()
        assert_same_bits(model.statistics(variant, y, 12), statistics)


def test_no_contexts_give_no_logits():
    assert new_model().logits(np.empty((0, 3), dtype=np.int64)).shape == (0, 257)


# statistics


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 37])
def test_statistics_are_the_integers_of_the_definition(shape, size):
    model = new_model(*shape)
    contexts, targets = batch(model, size)
    V, K, D = shape
    q, a = gradient_bits(size, K)
    z = model.logits(contexts)
    w, S = integer_weights(z)
    d = np.rint(w * (2.0**q / S))
    d[np.arange(size), targets] -= 2.0**q
    _, (E, _, W, _) = model.grids_of_step(a)
    E, W, d = (np.vectorize(int, otypes=[object])(x) for x in (E, W, d))  # Python integers
    dE, dW = np.full((V, D), 0, object), np.full((D, K, V), 0, object)
    for n, context in enumerate(contexts):
        for k, token in enumerate(context):
            dE[token] += (W[:, k] * d[n]).sum(axis=1)
            dW[:, k] += E[token][:, None] * d[n]
    statistics = model.statistics(contexts, targets, size)
    views = model.views(statistics.vector)
    assert (views["E"] == dE).all()
    assert (views["W"] == dW).all()
    assert (views["b"] == d.sum(axis=0)).all()
    losses = -log_softmax(z)[np.arange(size), targets]
    assert statistics.loss == sum(round(float(loss) * 2**32) for loss in losses)
    assert statistics.count == size
    assert statistics.mean_loss == statistics.loss / size * 2.0**-32


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_statistics_of_parts_add_up_bit_for_bit_in_any_number_and_order(size, parts, seed):
    model, rng = new_model(40, 3, 4), np.random.Generator(np.random.PCG64(seed))
    contexts, targets = batch(model, size, seed)
    whole = model.statistics(contexts, targets, size)
    order = rng.permutation(size)  # which prediction falls into which part; parts may be empty
    cuts = np.sort(rng.integers(0, size + 1, parts - 1), kind="stable")
    pieces = [model.statistics(contexts[i], targets[i], size) for i in np.split(order, cuts)]
    assert_same_bits(reduce(add, pieces), whole)
    assert_same_bits(reduce(add, [pieces[i] for i in rng.permutation(parts)]), whole)
    middle = parts // 2
    if middle:  # another bracketing
        tree = reduce(add, pieces[:middle]) + reduce(add, pieces[middle:])
        assert_same_bits(tree, whole)
    assert model.gradient(reduce(add, pieces)).tobytes() == model.gradient(whole).tobytes()


def test_parts_with_wholly_different_tokens_add_up_the_largest_embedding_among_them():
    model = new_model()
    model.parameters["E"][200] *= 7.3
    model.changed()
    low, high = np.array([[1, 2, 3], [3, 2, 2]]), np.array([[200, 201, 200]])
    y = np.array([5, 6, 7])
    parts = model.statistics(low, y[:2], 3), model.statistics(high, y[2:], 3)
    whole = model.statistics(np.concatenate([low, high]), y, 3)
    assert_same_bits(parts[0] + parts[1], whole)
    assert_same_bits(parts[1] + parts[0], whole)


def test_no_predictions_are_the_zero_of_the_sum():
    model = new_model()
    contexts, targets = batch(model, 6)
    some = model.statistics(contexts, targets, 6)
    none = model.statistics(contexts[:0], targets[:0], 6)
    assert (none.count, none.loss, none.vector.any()) == (0, 0, False)
    assert_same_bits(none + some, some)
    assert_same_bits(some + none, some)


def test_statistics_and_gradients_are_not_overwritten_by_later_ones():
    model = new_model()
    contexts, targets = batch(model, 20)
    first = model.statistics(contexts[:10], targets[:10], 20)
    gradient = model.gradient(first)
    kept, kept_gradient = first.vector.copy(), gradient.copy()
    second = model.statistics(contexts[10:], targets[10:], 20)
    model.gradient(first + second)
    assert first.vector.tobytes() == kept.tobytes()
    assert gradient.tobytes() == kept_gradient.tobytes()
    assert model.gradient(first).tobytes() == kept_gradient.tobytes()


def test_statistics_of_different_steps_do_not_add_up():
    model = new_model()
    contexts, targets = batch(model, 4)
    parts = [model.statistics(contexts, targets, size) for size in (4, 8)]
    with pytest.raises(OptionError, match=r"step_size must be the same \(got 4 and 8\)$"):
        parts[0] + parts[1]


# every sum at its bound


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(257, 8, 64), (2, 1, 1), (257, 3, 171), (1024, 8, 128)])
def test_logits_are_exact_with_every_parameter_at_the_grids_limit(shape, sign):
    model = Model(*shape)
    V, K, D = shape
    entry = 1.0 - 2.0**-model.bits  # the odd integer 2^bits − 1 on the grid
    model.parameters["E"][...], model.parameters["W"][...] = entry, sign * entry
    model.changed()
    exact = sign * K * D * Fraction(entry) ** 2
    contexts = np.full((5, K), V - 1)
    assert {Fraction(z) for z in model.logits(contexts).reshape(-1).tolist()} == {exact}
    assert K * D * (2**model.bits) ** 2 <= 2**53
    # training's sums reach the same limit: all logits are equal, so every loss is ln V
    statistics = model.statistics(contexts, np.zeros(5, dtype=np.int64), 5)
    assert statistics.mean_loss == pytest.approx(np.log(V), abs=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("vocab_size", "context_length", "size", "share"),  # share of the bound that is reached
    [(257, 4, 256, 2 / 3), (5, 2, 2**20, 2 / 3), (3, 3, 1000, 1 / 4), (2**17 - 1, 16, 2**21, 1)],
)
@pytest.mark.parametrize("passes", [np.inf, -np.inf], ids=["by contexts", "by table"])
def test_gradient_sums_are_exact_with_every_term_at_its_limit(
    vocab_size, context_length, size, share, passes, sign, monkeypatch
):
    """All predictions share one context, all weights have the largest size and the sign of their
    d. Either a certain token is never the target, or all are as likely, and rounding doubles d."""
    monkeypatch.setattr(gradient, "PASSES", passes)
    V, K = vocab_size, context_length
    model = Model(V, K, 1)
    q, a = gradient_bits(size, K)
    model.parameters["E"][...], model.parameters["W"][...] = 1.0, sign
    model.parameters["W"][:, :, 1] = -sign
    model.parameters["b"][1] = 2.0 * K * sign  # so that its logit is that of the others
    if V < 2**16:
        model.parameters["b"][0] = 60.0
    model.changed()
    part = model.statistics(np.full((1, K), 2), np.ones(1, np.int64), size)
    d = [2**q, -(2**q), *[0] * (V - 2)] if V < 2**16 else [1, 1 - 2**q, *[1] * (V - 2)]
    whole, terms = part, 1
    while 2 * terms <= size:  # as many parts as the step has predictions, added up as a tree
        whole, terms = whole + whole, 2 * terms
    views = model.views(whole.vector)
    assert [int(x) for x in views["b"]] == [terms * x for x in d]
    for k in range(K):
        assert [int(x) for x in views["W"][0, k]] == [terms * 2**a * x for x in d]
    largest = terms * K * 2**a * sum(map(abs, d))
    assert int(views["E"][2, 0]) == sign * largest
    assert largest <= 3 * 2**51
    assert largest / (3 * 2**51) == pytest.approx(share, rel=1e-4)
    assert whole.loss == terms * part.loss


# gradient and loss


@pytest.mark.parametrize("shape", [(11, 3, 4), (7, 1, 1), (5, 4, 1), (3, 1, 6)])
@pytest.mark.parametrize("size", [1, 9])
def test_the_gradient_is_that_of_the_plain_formula_by_central_differences(shape, size):
    model = new_model(*shape)
    contexts, targets = batch(model, size)
    found = model.views(model.gradient(model.statistics(contexts, targets, size)))
    parameters = {name: value.copy() for name, value in model.parameters.items()}
    assert found.keys() == parameters.keys()
    scale = max(np.abs(gradient).max() for gradient in found.values())
    for name, parameter in parameters.items():
        for i in np.ndindex(parameter.shape):
            value, step, losses = parameter[i], 1e-5, []
            for shifted in (value + step, value - step):
                parameter[i] = shifted
                losses.append(plain_loss(parameters, contexts, targets))
            parameter[i] = value
            difference = (losses[0] - losses[1]) / (2 * step)
            assert abs(found[name][i] - difference) < 1e-5 * scale, (name, i)


def test_the_gradient_of_a_full_size_model_is_that_of_plain_float64():
    model = new_model(257, 8, 64)
    contexts, targets = batch(model, 64)
    E, W, b = (model.parameters[name] for name in ("E", "W", "b"))
    z = np.einsum("nkd,dkv->nv", E[contexts], W) + b
    p = np.exp(z - z.max(axis=1, keepdims=True))
    d = p / p.sum(axis=1, keepdims=True)
    d[np.arange(64), targets] -= 1.0
    dE = np.zeros_like(E)
    np.add.at(dE, contexts, np.einsum("nv,dkv->nkd", d, W))
    plain = {"E": dE, "W": np.einsum("nkd,nv->dkv", E[contexts], d), "b": d.sum(axis=0)}
    found = model.views(model.gradient(model.statistics(contexts, targets, 64)))
    for name in plain:
        scale = np.abs(plain[name]).max()
        assert np.abs(found[name] * 64 - plain[name]).max() < 1e-5 * scale, name


@pytest.mark.parametrize("shape", [(257, 8, 64), (257, 1, 1), (1024, 3, 5)])
def test_the_loss_is_that_of_plain_float64_to_3e_6_nats(shape):
    model = new_model(*shape)
    contexts, targets = batch(model, 100)
    found = model.statistics(contexts, targets, 100).mean_loss
    assert found == pytest.approx(plain_loss(model.parameters, contexts, targets), abs=3e-6)


def test_tokens_outside_the_batch_have_no_gradient():
    model = new_model()
    contexts, targets = batch(model, 4)
    dE = model.views(model.gradient(model.statistics(contexts, targets, 4)))["E"]
    absent = np.setdiff1d(np.arange(257), contexts)
    assert not dE[absent].any()
    assert not np.signbit(dE[absent]).any()
    assert dE[contexts.reshape(-1)].any(axis=1).all()


# trouble


@pytest.mark.parametrize("name", ["E", "W", "b"])
@pytest.mark.parametrize("culprit", [float("nan"), float("inf"), -float("inf"), 2.0**400])
def test_parameters_outside_the_grids_range_stop_before_any_kernel_runs(name, culprit):
    model = new_model()
    model.parameters[name].reshape(-1)[7] = culprit
    model.changed()
    contexts, targets = batch(model, 3)
    for use in (lambda: model.logits(contexts), lambda: model.statistics(contexts, targets, 3)):
        with pytest.raises(MinigenError, match=r"^magnitudes must be finite and below 2\^400"):
            use()


@pytest.mark.parametrize("culprit", [-1, 257])
def test_tokens_outside_the_vocabulary_are_refused(culprit):
    inside, outside = np.array([[1, 2, 3]]), np.array([[1, culprit, 3]])
    match = r"^token ids must be from 0 to 256 \(got "
    with pytest.raises(OptionError, match=match):
        new_model().statistics(outside, np.array([4]), 1)
    with pytest.raises(OptionError, match=match):
        new_model().statistics(inside, np.array([culprit]), 1)


def test_a_loss_that_the_integers_cannot_hold_stops():
    model = new_model()
    model.parameters["b"][3] = 1e5
    model.changed()
    with pytest.raises(MinigenError, match=r"^a loss must stay below 4096 nats"):
        model.statistics(np.array([[1, 2, 3]]), np.array([4]), 1)


@pytest.mark.parametrize("magnitude", [2.0**399, 2.0**-399, 2.0**-450, 5e-324, 0.0])
def test_parameters_of_any_magnitude_give_finite_logits_or_a_clear_error(magnitude):
    model = new_model()
    for name in ("E", "W"):
        model.parameters[name] *= magnitude
    model.changed()
    contexts, targets = batch(model, 3)
    assert np.isfinite(model.logits(contexts)).all()
    if magnitude < 1.0:
        statistics = model.statistics(contexts, targets, 3)
        assert np.isfinite(model.gradient(statistics)).all()


def test_sums_of_the_table_stay_integers():
    model = new_model(257, 8, 64)
    table, unit = model.table(np.arange(257))
    assert np.array_equal(table, np.rint(table))
    assert unit == 2.0 ** round(np.log2(unit))
    E, _, W, _ = model.grids()
    assert (exact_matmul(E, W.reshape(64, -1)).reshape(table.shape) == table).all()
    assert np.abs(exact_sum(np.abs(table), axis=1)).max() < 2.0**53


def test_memory_is_used_again_only_when_no_array_and_no_view_of_it_is_held():
    def differ_from(address):
        return all(recycled(6).ctypes.data != address for _ in range(20))

    array = recycled(6)
    array[...] = 1.0
    address, view = array.ctypes.data, array[2:].reshape(2, 2)
    del array
    assert differ_from(address)
    del view
    held = [recycled(6) for _ in range(20)]
    assert not any(np.shares_memory(*pair) for pair in combinations(held, 2))
    address = held.pop().ctypes.data
    assert not differ_from(address)


@pytest.mark.parametrize("token", [-1, 5, 2**40])
def test_what_is_no_token_has_no_logits(token):
    """Field report 47: never those of a token counted from the end."""
    with pytest.raises(OptionError, match=r"token ids must be from 0 to 4 \(got"):
        Model(5, 2, 3).logits(np.array([[0, token]]))
