"""The optimizer: AdamW and SGD against plain formulas, schedules, clipping, moments, trouble."""

import math

import mpmath
import numpy as np
import pytest

from minigen.errors import MinigenError, OptionError
from minigen.exact.streams import Stream
from minigen.model import engines, kernels
from minigen.model.model import Model
from minigen.model.optimizer import Optimizer, norm

OPTIONS = {
    "total_steps": 100,
    "name": "adamw",
    "learning_rate": 0.01,
    "betas": (0.9, 0.99),
    "momentum": 0.9,
    "weight_decay": 0.0,
    "gradient_clip": 0.0,
    "warmup_steps": 0,
    "decay": "constant",
}
SIZES = [1, 7, 1 << 14, (1 << 15) + 5]  # blocks of the update: one, a part, exactly one, several


def new_optimizer(size: int = 7, **options: object) -> Optimizer:
    return Optimizer(size, **{**OPTIONS, **options})  # type: ignore[arg-type]


def numbers(size: int, seed: int = 0) -> np.ndarray:
    """Evenly spread in ±1."""
    return 2.0 * Stream(seed, "numbers").uniforms(size) - 1.0


# the update rules


def test_an_option_that_no_rule_asks_for_is_refused():
    with pytest.raises(OptionError, match=r"^optimizer\.dampening has no effect: no rule "):
        new_optimizer(dampening=0.1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_the_published_rule(size, weight_decay):
    # Loshchilov and Hutter (2019), algorithm 2, with m̂ and v̂ spelt out.
    optimizer = new_optimizer(size, weight_decay=weight_decay, decay="linear", warmup_steps=2)
    found = numbers(size)
    p, m, v = found.copy(), np.zeros(size), np.zeros(size)
    for t in range(1, 9):
        g = numbers(size, seed=t) * 10.0 ** (t % 4 - 3)
        found, rate = optimizer.update(found, g), optimizer.rate
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.99**t)
        p = p - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + weight_decay * p)
        assert np.abs(found - p).max() < 1e-12
        assert optimizer.step == t


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_the_plain_rule_with_momentum(size, momentum):
    optimizer = new_optimizer(size, name="sgd", momentum=momentum, weight_decay=0.1)
    found = numbers(size)
    p, velocity = found.copy(), np.zeros(size)
    for t in range(1, 9):
        g = numbers(size, seed=t)
        found, rate = optimizer.update(found, g), optimizer.rate
        velocity = momentum * velocity + g
        p = p - rate * (velocity + 0.1 * p)
        assert np.abs(found - p).max() < 1e-12


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_is_decoupled_it_shrinks_weights_and_enters_no_moment(name):
    optimizer = new_optimizer(name=name, weight_decay=0.5, learning_rate=0.25)
    p = numbers(7)
    before = p.copy()
    p = optimizer.update(p, np.zeros(7))
    assert p.tolist() == (before * (1 - 0.25 * 0.5)).tolist()
    assert all(moment.tolist() == [0.0] * 7 for moment in optimizer.moments.values())


def test_the_first_step_of_adamw_moves_every_weight_by_the_learning_rate():
    p = new_optimizer(4).update(np.zeros(4), np.array([3.0, -1e-3, 1e5, 0.0]))
    assert p == pytest.approx([-0.01, 0.01, -0.01, 0.0], rel=2e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_weight_has_the_same_bits_whatever_stands_beside_it(name):
    p, g = numbers(40_000), numbers(40_000, seed=1)
    shuffled = np.argsort(numbers(40_000, seed=2), kind="stable")
    straight, mixed = p.copy(), p[shuffled]
    optimizers = [new_optimizer(40_000, name=name, gradient_clip=0.5) for _ in range(2)]
    for _ in range(3):
        straight = optimizers[0].update(straight, g)
        mixed = optimizers[1].update(mixed, g[shuffled])
    assert mixed.tobytes() == straight[shuffled].tobytes()


def test_the_gradient_is_left_as_it_was():
    g = numbers(7)
    g.flags.writeable = False
    new_optimizer(gradient_clip=0.1).update(numbers(7), g)
    assert g.tobytes() == numbers(7).tobytes()


def test_moments_are_named_as_the_checkpoint_stores_them():
    assert sorted(new_optimizer().moments) == ["m", "v"]
    assert sorted(new_optimizer(name="sgd").moments) == ["m"]


# clipping


def test_clipping_scales_the_gradient_to_the_limit_by_its_global_norm():
    g = np.array([3.0, 4.0])
    for limit, expected in (
        (1.0, [-0.6, -0.8]),
        (2.5, [-1.5, -2.0]),
        (5.0, [-3, -4]),
        (9, [-3, -4]),
    ):
        options = {"name": "sgd", "learning_rate": 1.0, "gradient_clip": limit}
        p = new_optimizer(2, **options).update(np.zeros(2), g)
        assert p == pytest.approx(expected, abs=1e-14)
    never = new_optimizer(2, name="sgd", learning_rate=1.0, gradient_clip=0.0)
    p = never.update(np.zeros(2), g)
    assert p.tolist() == [-3.0, -4.0]


def test_a_gradient_of_zeros_is_not_divided_by_its_norm():
    p = new_optimizer(gradient_clip=1.0).update(numbers(7), np.zeros(7))
    assert p.tobytes() == numbers(7).tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 1024, 1025, 1 << 18])
def test_the_norm_is_exact_with_every_entry_at_its_limit(size):
    # Squares of entries ±2^e are 2^(53 − ⌈log₂ P⌉) each on the grid: P of them fill it.
    x = np.full(size, 0.25)
    x[::3] = -0.25
    assert norm(x) == float(np.sqrt(float(size))) * 0.25
    assert size * 2 ** (53 - (size - 1).bit_length()) <= 2**53


@pytest.mark.parametrize("size", [1, 2, 1000, 1 << 17])
def test_the_norm_adds_python_integers_near_its_limit(size):
    x = 1.0 - 1e-3 * Stream(0, "numbers").uniforms(size)
    steps = 2.0 ** (53 - (size - 1).bit_length())
    total = sum(int(square) for square in np.rint(x * x * steps))
    assert total <= 2**53
    assert norm(x) == math.sqrt(total / steps)


@pytest.mark.parametrize("scale", [1.0, 1e-100, 1e100, 2.0**399])
def test_the_norm_is_that_of_exact_arithmetic(scale):
    x = numbers(3000) * scale
    with mpmath.workprec(200):
        true = mpmath.sqrt(mpmath.fsum(mpmath.mpf(float(value)) ** 2 for value in x))
        assert abs(norm(x) / true - 1) < 1e-11


def test_the_norm_has_the_same_bits_in_any_order_and_split():
    x = numbers(100_000)
    shuffled = x[np.argsort(numbers(100_000, seed=1), kind="stable")]
    assert norm(shuffled).hex() == norm(x).hex()
    assert norm(np.repeat(x, 2)[::2]).hex() == norm(x).hex()
    assert norm(np.zeros(5)) == 0.0


@pytest.mark.parametrize("culprit", [float("nan"), float("inf"), 2.0**400])
def test_a_gradient_outside_the_grids_range_cannot_be_clipped(culprit):
    with pytest.raises(MinigenError, match=r"^magnitudes must be finite and below 2\^400"):
        norm(np.array([1.0, culprit]))


# learning rate


def test_warm_up_rises_in_equal_steps_to_the_peak():
    optimizer = new_optimizer(warmup_steps=4, total_steps=10, learning_rate=0.5)
    rates = [optimizer.learning_rate(step) for step in range(1, 11)]
    assert rates == [0.125, 0.25, 0.375, 0.5, *[0.5] * 6]


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.5, 0.375, 0.25, 0.125]),
        ("cosine", [0.5, 0.25 + math.sqrt(0.5) / 4, 0.25, 0.25 - math.sqrt(0.5) / 4]),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_decay_starts_at_the_peak_and_would_reach_zero_one_step_behind_the_last(
    decay, rates, warmup_steps
):
    total = 4 + warmup_steps
    options = {"learning_rate": 0.5, "warmup_steps": warmup_steps, "total_steps": total}
    optimizer = new_optimizer(decay=decay, **options)
    found = [optimizer.learning_rate(step) for step in range(warmup_steps + 1, total + 1)]
    assert found == pytest.approx(rates, abs=1e-15)
    assert found[0] == 0.5
    if decay != "constant":
        assert optimizer.learning_rate(total + 1) == pytest.approx(0.0, abs=1e-16)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_learning_rates_are_positive_and_never_above_the_peak(decay):
    for warmup_steps, total in ((0, 1), (1, 1), (5, 3), (10, 1500)):
        optimizer = new_optimizer(warmup_steps=warmup_steps, total_steps=total, decay=decay)
        rates = [optimizer.learning_rate(step) for step in range(1, total + 1)]
        assert min(rates) > 0.0
        assert max(rates) <= 0.01


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_changes_neither_the_weights_nor_the_moments_that_it_starts_from(name):
    optimizer, p = new_optimizer(name=name), numbers(7)
    for array in (p, *optimizer.moments.values()):
        array.flags.writeable = False
    assert optimizer.rate == 0.0  # of no update yet
    optimizer.update(p, numbers(7, seed=1))
    assert p.tobytes() == numbers(7).tobytes()


# moments and resuming


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_moments_too_small_to_matter_become_positive_zero(name):
    optimizer = new_optimizer(4, name=name, betas=(0.5, 0.5), momentum=0.5)
    g = np.array([-(2.0**-402), 2.0**-402, -5e-324, -(2.0**-390)])
    optimizer.update(np.ones(4), g)
    for moment in optimizer.moments.values():
        assert moment[:3].tolist() == [0.0, 0.0, 0.0]
        assert not np.signbit(moment[:3]).any()
    assert optimizer.moments["m"][3] == -(2.0**-390) * (0.5 if name == "adamw" else 1.0)
    if name == "adamw":
        assert optimizer.moments["v"][3] == 2.0**-781


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_moment_at_its_limit_stays_and_one_below_does_not(sign):
    for g, stays in ((2.0**-400, True), (np.nextafter(2.0**-400, 0.0), False)):
        for name in ("sgd", "adamw"):
            optimizer = new_optimizer(1, name=name, betas=(0.0, 0.0), momentum=0.0)
            optimizer.update(np.ones(1), np.array([sign * g]))
            kept = {moment: values[0] for moment, values in optimizer.moments.items()}
            assert kept["m"] == (sign * g if stays else 0.0)
            assert kept.get("v", g * g) == (g * g if stays or name == "sgd" else 0.0)


def test_moments_fade_to_positive_zero_and_never_to_a_subnormal_number():
    optimizer = new_optimizer(2, betas=(0.1, 0.1))
    p = optimizer.update(np.ones(2), np.array([-1.0, 1e-30]))
    for _ in range(300):
        p = optimizer.update(p, np.zeros(2))
        for moment, smallest in zip(
            optimizer.moments.values(), (2.0**-400, 2.0**-800), strict=True
        ):
            assert ((moment == 0.0) | (np.abs(moment) >= smallest)).all()
    for moment in optimizer.moments.values():
        assert moment.tobytes() == np.zeros(2).tobytes()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("stop", [0, 1, 5, 8])
def test_resuming_from_step_and_moments_goes_on_bit_for_bit(name, stop):
    options = {"name": name, "weight_decay": 0.01, "gradient_clip": 1.0, "decay": "cosine"}
    whole, straight = new_optimizer(**options), numbers(7)
    first, broken = new_optimizer(**options), numbers(7)
    for t in range(9):
        straight = whole.update(straight, numbers(7, seed=t))
        if t == stop:
            again = new_optimizer(**options)
            again.resume(first.step)
            for key, moment in first.moments.items():
                again.moments[key][...] = moment
            first = again
        broken = first.update(broken, numbers(7, seed=t))
    assert broken.tobytes() == straight.tobytes()
    assert first.step == whole.step == 9


def test_bias_corrections_after_a_resume_are_the_same_running_products():
    # 0.9·0.9·… differs from 0.9**t in its last bits at some t, and those bits would show.
    product, differs = 1.0, False
    straight, resumed = new_optimizer(1), new_optimizer(1)
    for t in range(1, 60):
        product *= 0.9
        differs |= product != math.pow(0.9, t)
        resumed.resume(straight.step)
        for key, moment in straight.moments.items():
            resumed.moments[key][...] = moment
        a = straight.update(np.zeros(1), np.ones(1))
        b = resumed.update(np.zeros(1), np.ones(1))
        assert a.tobytes() == b.tobytes()
    assert differs


def test_a_resume_after_any_number_of_steps_takes_no_longer_than_the_products_change():
    far, near = new_optimizer(1), new_optimizer(1)
    far.resume(10**18)
    near.resume(10**6)
    assert far._beta_powers == near._beta_powers


# trouble


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("learning_rate", [1e6, 1e150, 1e308])
@pytest.mark.parametrize("gradient_clip", [0.0, 1.0])
@pytest.mark.parametrize("engine", ["compiled", "numpy"])
def test_a_learning_rate_that_diverges_ends_in_a_clear_error_and_no_warning(
    name, learning_rate, gradient_clip, engine, monkeypatch
):
    if engine == "numpy":
        monkeypatch.setattr(engines, "chosen", lambda: kernels)
    start = Model(257, 2, 3)
    start.initialize(Stream(0, "init"))
    start.flat *= 9.0  # so that a gradient is larger than one
    start.changed()
    options = {"learning_rate": learning_rate, "gradient_clip": gradient_clip}
    optimizer = new_optimizer(start.flat.size, name=name, **options)
    contexts, stream = np.array([[1, 2], [3, 4], [2, 1]]), Stream(0, "optimizer")

    def train() -> None:
        model = start
        for _ in range(50):
            statistics = model.statistics(contexts, stream.integers(3, 257), 3)
            weights = optimizer.update(model.flat, model.gradient(statistics))
            model = model.with_weights(weights)

    with pytest.raises(MinigenError, match=r"^(magnitudes must be finite|a loss must stay below)"):
        train()
