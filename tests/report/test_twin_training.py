"""The twin trains: its arithmetic, gradient, updates and whole runs are Python's, bit for bit."""

import random
from typing import Any

import numpy as np
import pytest

from minigen.exact import arithmetic
from minigen.exact.streams import Stream
from minigen.model import head, optimizer, rules
from minigen.model.model import Model
from minigen.text.tokenizer import END_OF_TEXT
from tests.report.asking import ask, coded, floats, needs_node

pytestmark = needs_node


def same_bits(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(floats(got).view(np.int64), expected.reshape(-1).view(np.int64))


# Arithmetic


def test_every_constant_is_pythons():
    expected = {
        "STEPS_PER_NAT": arithmetic._STEPS_PER_NAT,
        "STEP_HIGH": arithmetic._STEP_HIGH,
        "STEP_LOW": arithmetic._STEP_LOW,
        "LN2_HIGH": arithmetic._LN2_HIGH,
        "LN2_LOW": arithmetic._LN2_LOW,
        "ROOTS": coded(arithmetic._ROOTS),
        "PER_HALF_PI": (1 << 128) / arithmetic._HALF_PI,
        "HALF_PI_HIGH": arithmetic._HALF_PI_HIGH,
        "HALF_PI_MIDDLE": arithmetic._HALF_PI_MIDDLE,
        "HALF_PI_LOW": arithmetic._HALF_PI_LOW,
        "EXPONENT_LIMIT": arithmetic._EXPONENT_LIMIT,
        "LOSS_UNIT": head.LOSS_UNIT,
        "LOSS_LIMIT": head._LOSS_LIMIT,
        "PI": optimizer._PI,
        "EPSILON": rules._EPSILON,
        "SMALLEST_FIRST": rules._SMALLEST_FIRST,
        "SMALLEST_SECOND": rules._SMALLEST_SECOND,
        "END_OF_TEXT": END_OF_TEXT,
    }
    assert ask("constants") == expected


def test_logarithms_are_those_of_python():
    dice = random.Random(1)
    x = np.array([1.0, 0.5, 2.0**0.5, 2.0**-0.5, 257.0, 1e-300, 1e300])
    x = np.append(x, [dice.uniform(0, 1024) for _ in range(5000)])
    same_bits(ask("functions", name="log", x=coded(x)), arithmetic.log(x))


def test_cosines_are_those_of_python():
    dice = random.Random(2)
    x = np.array(
        [0.0, 1.0, 3.141592653589793, -2.0, 2.0**20, *(dice.uniform(-9, 9) for _ in range(5000))]
    )
    same_bits(ask("functions", name="cos", x=coded(x)), arithmetic.cos(x))


@pytest.mark.parametrize("bits", [0, 17, 22])
def test_grid_units_are_those_of_python_on_both_sides_of_every_power_of_two(bits):
    powers = 2.0 ** np.array([-500.0, -400, -399, -1, 0, 1, 10, 399])
    largest = np.concatenate(
        [[0.0, 5e-324], *([p * (1 - 2**-53), p, p * (1 + 2**-52)] for p in powers)]
    )
    expected = np.array([arithmetic.grid_unit(float(x), bits) for x in largest])
    same_bits(ask("units", largest=coded(largest), bits=bits), expected)


def test_bounded_words_are_those_of_python():
    for first, below in [(0, 1), (5, 257), (2**20 + 3, 1_000_003), (7, 2**32)]:
        expected = Stream(3, "optimizer", first).integers(9, below).tolist()
        got = ask("integers", seed="3", name="optimizer", first=first, count=9, below=below)
        assert got == expected


# The gradient


def model(shape, seed=0, size=1.0):
    made = Model(*shape)
    made.initialize(Stream(seed, "init"))
    made.flat *= size
    made.changed()
    return made


def test_initial_weights_are_those_of_python():
    shape = (260, 3, 5)
    same_bits(ask("initial", seed="12", shape=shape), model(shape, seed=12).flat)


def plain_loss_and_gradient(made, contexts, targets):
    """The gradient as the specification states it: an outer product a prediction, in integers."""
    N, K = contexts.shape
    bits = 51 - arithmetic.ceil_log2(N) - arithmetic.ceil_log2(K)
    a = (bits - 6) // 2
    q = bits - a
    E, W, b = made.parameters.values()
    E_integers, E_unit = arithmetic.round_to_grid(E, a)
    W_integers, W_unit = arithmetic.round_to_grid(W, a)
    E_integers, W_integers = E_integers.astype(np.int64), W_integers.astype(np.int64)
    dE, dW, db = (np.zeros(x.shape, np.int64) for x in (E, W, b))
    loss = 0
    for x, y in zip(contexts, targets, strict=True):
        z = head.project(made.hidden(x[None]), W, b)[0]
        w, S = head.integer_weights(z)
        d = np.rint(w * (2.0**q / S)).astype(np.int64)
        d[y] -= 1 << q
        db += d
        for k, token in enumerate(x):
            dW[:, k] += E_integers[token][:, None] * d
            dE[token] += W_integers[:, k] @ d
        loss += round(-float(head.log_softmax(z)[y]) * 2**32)
    scale = 2.0**-q / N
    gradient = [dE * (W_unit * scale), dW * (E_unit * scale), db * scale]
    return np.concatenate([[loss / N * 2.0**-32], *(part.reshape(-1) for part in gradient)])


@pytest.mark.parametrize("shape", [(257, 1, 1), (257, 3, 1), (260, 2, 5), (300, 5, 7), (513, 4, 2)])
@pytest.mark.parametrize("distinct", [2, 257])
def test_the_gradient_is_the_plain_sum_of_integers(shape, distinct):
    """Few distinct tokens go by table, many by contexts; no batch size is special."""
    dice = random.Random(repr((shape, distinct)))
    cases, expected = [], []
    for N in (1, 2, 3, 24, 33):
        made = model(shape, seed=N, size=dice.choice([1.0, 0.01, 30.0]))
        contexts = np.array([[dice.randrange(distinct) for _ in range(shape[1])] for _ in range(N)])
        targets = [dice.randrange(shape[0]) for _ in range(N)]
        cases.append(
            {
                "weights": coded(made.flat),
                "shape": shape,
                "contexts": contexts.reshape(-1).tolist(),
                "targets": targets,
            }
        )
        expected.append(plain_loss_and_gradient(made, contexts, targets))
    for got, right in zip(ask("gradients", cases=cases), expected, strict=True):
        np.testing.assert_array_equal(floats(got), right)


# The update


OPTIONS = {
    "name": "adamw",
    "learning_rate": 0.01,
    "betas": (0.9, 0.99),
    "momentum": 0.8,
    "weight_decay": 0.1,
    "gradient_clip": 1.0,
    "warmup_steps": 3,
    "decay": "cosine",
}


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 40])
def test_learning_rates_are_those_of_python(decay, warmup_steps):
    options = {**OPTIONS, "decay": decay, "warmup_steps": warmup_steps}
    schedule = optimizer.Optimizer(1, total_steps=30, **options)
    expected = np.array([schedule.learning_rate(step) for step in range(1, 31)])
    same_bits(ask("rates", options=options, steps=30), expected)


def test_norms_are_those_of_python():
    dice = random.Random(4)
    sizes = [1, 2, 3, 257, 1000]
    vectors = [np.array([dice.gauss(0, 1) for _ in range(size)]) for size in sizes]
    vectors += [np.zeros(5), np.ones(1024), np.array([1e-200, 3e-200]), np.array([-2.0, 0.0])]
    expected = np.array([optimizer.norm(vector) for vector in vectors])
    same_bits(ask("norms", vectors=[coded(vector) for vector in vectors]), expected)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("gradient_clip", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_are_those_of_python(name, gradient_clip, weight_decay):
    """From moments on both sides of where they become +0, of either sign."""
    options = {
        **OPTIONS,
        "name": name,
        "gradient_clip": gradient_clip,
        "weight_decay": weight_decay,
    }
    dice = random.Random(name)
    edge = [s * 2.0**-400 * f for s in (1, -1) for f in (1, 0.7, 1.2, 1.5)] + [0.0, -0.0, 1e-300]
    size = 50 + len(edge)
    weights = np.array([dice.gauss(0, 1) for _ in range(size)])
    first = np.array([dice.gauss(0, 0.1) for _ in range(50)] + edge)
    moments = [first, first * first][: 2 if name == "adamw" else 1]
    gradients = [np.array([dice.gauss(0, 1) for _ in range(50)] + [0.0] * len(edge)) for _ in "abc"]
    answer = ask(
        "updates",
        options=options,
        steps=20,
        weights=coded(weights),
        moments=[coded(moment) for moment in moments],
        gradients=[coded(gradient) for gradient in gradients],
    )
    reference = optimizer.Optimizer(size, total_steps=20, **options)
    reference.resume(3)
    for view, moment in zip(reference.moments.values(), moments, strict=True):
        view[:] = moment
    for gradient in gradients:
        reference.update(weights, gradient)
    for got, right in zip(answer, [weights, *reference.moments.values()], strict=True):
        same_bits(got, right)
