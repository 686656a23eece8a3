"""Exact arithmetic: accuracy against mpmath, special values, and sums that no order can change."""

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen.errors import MinigenError, OptionError
from minigen.exact import arithmetic
from minigen.exact.arithmetic import (
    ceil_log2,
    cos,
    exact_matmul,
    exact_sum,
    exp,
    grid_bits,
    integer_exp,
    largest_magnitude,
    log,
    round_to_grid,
)

INF, NAN = float("inf"), float("nan")
TINY = 5e-324  # the smallest subnormal number, 2^-1074
LARGEST = np.finfo(np.float64).max
NORMAL = np.finfo(np.float64).tiny  # the smallest normal number, 2^-1022
LENGTHS = [1, 2, 3, 256, 257, 512, 513, 1024, 4097]  # of a contracted axis: max(K·D, V)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@pytest.fixture(autouse=True)
def precision():
    with mpmath.workprec(160):
        yield


def true_values(function: Callable, x: np.ndarray) -> list:
    return [function(mpmath.mpf(float(value))) for value in x]


def ulps(found: np.ndarray, true: list) -> float:
    """Largest error in units in the last place of the true value."""
    spacing = np.spacing(np.abs([float(value) for value in true]))
    errors = [abs(mpmath.mpf(float(f)) - t) for f, t in zip(found, true, strict=True)]
    return max(float(e / mpmath.mpf(float(s))) for e, s in zip(errors, spacing, strict=True))


# exp


def test_exp_is_within_1e_14_relative_wherever_its_value_is_a_normal_number():
    rng = generator()
    x = np.concatenate(
        [
            rng.uniform(-708.39, 709.78, 6000),
            rng.uniform(-40, 0, 3000),
            rng.uniform(-1, 1, 3000),
            np.ldexp(rng.uniform(-1, 1, 500), rng.integers(-1070, 0, 500)),
            # both sides of the places where k, the nearest multiple of ln 2/1024, changes
            (np.arange(-2000, 2000) + 0.5) * (np.log(2.0) / 1024),
            [709.782712893384, -708.3964185322641],
        ]
    )
    for found, true in zip(exp(x), true_values(mpmath.exp, x), strict=True):
        assert abs(mpmath.mpf(float(found)) / true - 1) < 1e-14


def test_exp_rounds_to_subnormal_numbers_below_2_to_the_minus_1022():
    x = np.linspace(-745.2, -708.4, 2001)
    for found, true in zip(exp(x), true_values(mpmath.exp, x), strict=True):
        assert abs(mpmath.mpf(float(found)) - true) <= 1e-14 * true + mpmath.mpf(TINY) / 2


@pytest.mark.parametrize(
    ("x", "value"),
    [
        (0.0, 1.0),
        (-0.0, 1.0),
        (TINY, 1.0),
        (-TINY, 1.0),
        (-NORMAL, 1.0),
        (INF, INF),
        (LARGEST, INF),
        (709.782712893385, INF),
        (-INF, 0.0),
        (-LARGEST, 0.0),
        (-746.0, 0.0),
        (-745.2, 0.0),
        (-745.1, TINY),
    ],
)
def test_exp_of_special_numbers(x, value):
    assert exp(x) == value
    assert not np.signbit(exp(x))


def test_exp_log_and_cos_of_nan_are_nan():
    for function in (exp, log, cos):
        assert np.isnan(function(NAN))


@pytest.mark.parametrize(
    ("function", "bits"),
    [
        (exp, ["0x1.1aec7b35a00d3p+0", "0x1.415e5bf6fb106p+4", "0x1.5829dcf950560p+14"]),
        (log, ["-0x1.26bb1bbb55515p+1", "0x1.193ea7aad030ap+0", "0x1.26bb1bbb55516p+1"]),
        (cos, ["0x1.fd712f9a817c0p-1", "-0x1.fae04be85e5d2p-1", "-0x1.ad9ac890c6b1fp-1"]),
    ],
)
def test_bits_are_pinned_at_a_tenth_three_and_ten(function, bits):
    assert [float(x).hex() for x in function([0.1, 3.0, 10.0])] == bits


@pytest.mark.parametrize(
    ("function", "x", "bits"),
    [
        (exp, "-0x1.a31ff4378068cp+8", "0x1.41f3a17a3db99p-605"),  # with ln 2 split a bit later
        (exp, "-0x1.192ce431444fcp+9", "0x1.9fb44cae0deeap-812"),
        (log, "0x1.6a09e667f3bcdp+20", "0x1.c6b45d6b09a3bp+3"),  # of 2^21·√½, above the bound
        (log, "0x1.689ebe111cf6ap+0", "0x1.5edf013e900f6p-2"),  # with 9 terms it is another
        (log, "0x1.677dbb1d06160p+0", "0x1.5ba90dcc60402p-2"),  # with 11
        (log, "0x1.6a3bdfc39c1adp-1", "-0x1.6256e09b709c7p-2"),  # with 11, below 1
        (cos, "0x1.f203026754da9p+1", "-0x1.76ee229a7ea6ep-1"),  # with a factor fewer
        (cos, "0x1.01e8182d91100p+11", "-0x1.6e59337f979d3p-1"),  # with one more
        (cos, "0x1.ff54e8a451fb7p+19", "0x1.d1ee22713f044p-3"),  # with less of π/2
    ],
)
def test_bits_are_pinned_where_a_length_of_a_series_or_constant_or_a_bound_decides_them(
    function, x, bits
):
    assert float(function(float.fromhex(x))).hex() == bits


@pytest.mark.parametrize("bits", [52, 51, 43, 42, 36])
def test_integer_exp_is_exp_scaled_and_rounded_bit_for_bit(bits):
    span = arithmetic.exp_span(bits)
    gap = np.concatenate(
        [
            generator(bits).uniform(0.0, span * 1.1, 50_000),
            generator(bits).uniform(0.0, 1e-3, 5_000),
            np.nextafter(span, [0.0, INF]),
            [0.0, TINY, NORMAL, span, 745.0, 800.0, 1e300, INF],
        ]
    )
    expected = np.rint(exp(-gap) * 2.0**bits)
    assert integer_exp(gap, bits).tobytes() == expected.tobytes()
    assert integer_exp(np.array([0.0]), bits) == 2.0**bits


def test_integer_exp_is_within_one_of_the_true_weight():
    gap, bits = np.linspace(0.0, 40.0, 3001), 43
    for found, true in zip(integer_exp(gap, bits), true_values(mpmath.exp, -gap), strict=True):
        assert abs(mpmath.mpf(float(found)) - true * 2**bits) <= 1


def test_table_of_exp_is_correctly_rounded():
    table = arithmetic.exp_table.__wrapped__(43)
    assert not table.flags.writeable  # one for all who ask
    assert [float(x) for x in table[:1025]] == [
        float(mpmath.mpf(2) ** (43 - mpmath.mpf(m) / 1024)) for m in range(1025)
    ]


# log


def test_log_is_within_4_ulp_over_the_whole_range():
    rng = generator(1)
    x = np.concatenate(
        [
            np.ldexp(rng.uniform(0.5, 1.0, 6000), rng.integers(-1021, 1025, 6000)),
            np.ldexp(rng.integers(1, 2**30, 500).astype(np.float64), -1074),  # subnormal
            rng.uniform(0.5, 2.0, 4000),
            1.0 + np.ldexp(rng.uniform(-1.0, 1.0, 2000), rng.integers(-52, -1, 2000)),
            np.sqrt(0.5) * (1.0 + np.arange(-50, 50) * 2.0**-52),  # where the octave changes
            np.nextafter(1.0, [0.0, 2.0]),
            [TINY, NORMAL, LARGEST, 2.0, 0.5, 3.0],
        ]
    )
    x = x[x != 1.0]
    assert ulps(log(x), true_values(mpmath.log, x)) < 4


@pytest.mark.parametrize(
    ("x", "value"),
    [(0.0, -INF), (-0.0, -INF), (INF, INF), (-INF, NAN), (-TINY, NAN), (-1.0, NAN), (1.0, 0.0)],
)
def test_log_of_special_numbers(x, value):
    assert np.array_equal(log(x), value, equal_nan=True)


def test_log_of_one_is_positive_zero():
    assert not np.signbit(log(1.0))


# cos


def test_cos_is_within_1e_15_up_to_2_to_the_20():
    rng, quarter = generator(2), np.pi / 2
    x = np.concatenate(
        [
            rng.uniform(-(2.0**20), 2.0**20, 4000),
            rng.uniform(-7.0, 7.0, 4000),
            np.arange(-600, 600) * quarter,  # as near to the zeros as floats come
            np.arange(667_000, 667_500) * quarter,
            (np.arange(-100, 100) + 0.5) * quarter,  # where the quadrant changes
            [TINY, NORMAL, 2.0**20, -(2.0**20)],
        ]
    )
    for found, true in zip(cos(x), true_values(mpmath.cos, x), strict=True):
        assert abs(mpmath.mpf(float(found)) - true) < 1e-15


def test_cos_of_special_numbers():
    assert cos(0.0) == cos(-0.0) == cos(TINY) == 1.0
    assert cos(np.pi) == -1.0
    assert np.isnan(cos([INF, -INF])).all()


def test_cos_refuses_numbers_whose_reduction_would_lose_bits():
    with pytest.raises(OptionError, match=r"^cos takes \|x\| up to 2\^20 \(got 1048577\.0\)$"):
        cos(2.0**20 + 1)


@pytest.mark.parametrize("function", [exp, log, cos])
def test_arrays_of_any_shape_layout_and_type_give_float64_of_the_same_shape(function):
    x = generator(3).uniform(0.1, 9.0, (6, 8))
    whole = function(x)
    assert whole.dtype == np.float64
    assert whole.shape == (6, 8)
    assert function(np.asfortranarray(x)).tobytes() == whole.tobytes()
    assert function(x[::-2, 1::3]).tobytes() == whole[::-2, 1::3].tobytes()
    assert [function(float(value)) for value in x.reshape(-1)] == whole.reshape(-1).tolist()
    assert function(3) == function(np.float32(3)) == function(np.array(3)) == function([3.0])[0]
    assert type(function(np.longdouble(3))) is np.float64
    assert function(np.empty((0, 3))).shape == (0, 3)
    x.flags.writeable = False
    assert function(x).tobytes() == whole.tobytes()


# grids


def test_ceil_log2_is_the_smallest_exponent_that_reaches_n():
    for n in [*range(1, 2050), 2**31 - 1, 2**31, 2**31 + 1, 2**60 + 1]:
        bits = ceil_log2(n)
        assert 2**bits >= n
        assert bits == 0 or 2 ** (bits - 1) < n


def test_grid_bits_of_the_design():
    assert grid_bits(max(8 * 64, 257)) == 22
    assert [grid_bits(n) for n in (1, 2, 257, 512, 513, 1024, 1025)] == [26, 26, 22, 22, 21, 21, 21]


magnitudes = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e120, max_value=1e120)
near_powers = st.builds(
    lambda sign, exponent, distance: sign * 2.0**exponent * (1.0 + distance * 2.0**-53),
    st.sampled_from([-1, 1]),
    st.integers(-30, 30),
    st.integers(-64, 64),
)


@given(st.lists(magnitudes | near_powers, min_size=1, max_size=8), st.integers(2, 26))
@settings(max_examples=300)
def test_a_grid_is_within_its_bits_and_half_a_unit_and_rounding_twice_is_rounding_once(x, bits):
    x = np.array(x)
    integers, unit = round_to_grid(x, bits)
    assert np.array_equal(integers, np.rint(integers))
    assert np.abs(integers).max() <= 2**bits
    assert (np.abs(x - integers * unit) <= unit / 2).all()
    again, unit_again = round_to_grid(integers * unit, bits)
    assert np.array_equal(again * unit_again, integers * unit)


def test_rounding_up_to_the_limit_itself_is_still_on_the_grid():
    # 1 − 2^-30 rounds up to 1.0 = 2^22·unit: a grid chosen again must not be coarser.
    integers, unit = round_to_grid(np.array([1 - 2.0**-30, 3 * 2.0**-22]), 22)
    assert integers.tolist() == [2.0**22, 3.0]
    assert round_to_grid(integers * unit, 22)[0].tolist() == [2.0**22, 3.0]


def test_a_grid_takes_zeros_and_nothing_and_magnitudes_that_are_tiny_or_just_below_2_to_the_400():
    for x in ([0.0, -0.0], [], [TINY, -NORMAL]):
        integers, unit = round_to_grid(np.array(x), 22)
        assert (integers == 0).all()
        assert unit >= 2.0**-422
    integers, unit = round_to_grid(np.array([np.nextafter(2.0**400, 0)]), 22)
    assert integers * unit == 2.0**400


@pytest.mark.parametrize(
    ("x", "largest"), [([], 0.0), ([[1.0, -3.0], [2.0, 0.0]], 3.0), ([-1.0, 2.0], 2.0)]
)
def test_the_largest_magnitude_is_of_either_sign_and_0_of_nothing(x, largest):
    assert largest_magnitude(np.array(x)) == largest


@pytest.mark.parametrize("culprit", [NAN, INF, -INF, 2.0**400, -LARGEST])
def test_a_grid_refuses_what_is_not_finite_or_too_large(culprit):
    with pytest.raises(MinigenError, match=r"^magnitudes must be finite and below 2\^400 \(got "):
        round_to_grid(np.array([1.0, culprit, 0.0]), 22)


def test_a_grid_takes_any_layout_and_leaves_what_it_was_given():
    x = generator(4).uniform(-1.0, 1.0, (6, 8))
    integers, _ = round_to_grid(x, 22)
    before = x.tobytes()
    assert round_to_grid(x.T, 22)[0].T.tobytes() == integers.tobytes()
    assert x.tobytes() == before


# products and sums


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("length", LENGTHS)
def test_products_are_exact_with_every_operand_at_its_limit(length, sign):
    limit = 2 ** grid_bits(length)
    for entry in (limit, limit - 1):
        a, b = np.full((3, length), float(entry)), np.full((length, 2), float(sign * entry))
        total = sign * length * entry * entry
        assert abs(total) <= 2**53
        assert [int(x) for x in exact_matmul(a, b).reshape(-1)] == [total] * 6


@pytest.mark.parametrize("length", LENGTHS)
def test_products_equal_those_of_python_integers(length):
    limit = 2 ** grid_bits(length)
    a = generator(5).integers(-limit, limit, (3, length), endpoint=True)
    b = generator(6).integers(-limit, limit, (length, 4), endpoint=True)
    found = exact_matmul(a.astype(np.float64), b.astype(np.float64))
    for i in range(3):
        for j in range(4):
            expected = sum(int(x) * int(y) for x, y in zip(a[i], b[:, j], strict=True))
            assert int(found[i, j]) == expected


@given(st.sampled_from(LENGTHS), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_shuffling_splitting_or_laying_out_the_summed_axis_changes_no_bit(length, seed):
    rng, limit = generator(seed), 2 ** grid_bits(length)
    a = rng.integers(-limit, limit, (5, length), endpoint=True).astype(np.float64)
    b = rng.integers(-limit, limit, (length, 7), endpoint=True).astype(np.float64)
    product, total = exact_matmul(a, b) + 0.0, exact_sum(a, axis=1)  # + 0.0: one kind of zero

    shuffled = rng.permutation(length)
    assert (exact_matmul(a[:, shuffled], b[shuffled]) + 0.0).tobytes() == product.tobytes()
    assert exact_sum(a[:, shuffled], axis=1).tobytes() == total.tobytes()

    cut = int(rng.integers(0, length + 1))
    blocks = exact_matmul(a[:, :cut], b[:cut]) + exact_matmul(a[:, cut:], b[cut:])
    assert (blocks + 0.0).tobytes() == product.tobytes()

    strided = np.zeros((length * 2, 7))
    strided[::2] = b
    for left in (a, np.asfortranarray(a), a[:, ::-1].copy()[:, ::-1]):
        for right in (b, np.asfortranarray(b), strided[::2]):
            assert (exact_matmul(left, right) + 0.0).tobytes() == product.tobytes()
    assert (exact_matmul(b.T, a.T).T + 0.0).tobytes() == product.tobytes()
    rows = np.concatenate([exact_matmul(a[i : i + 1], b) for i in range(5)])
    assert (rows + 0.0).tobytes() == product.tobytes()


def test_without_the_grid_the_same_shuffle_does_change_bits():
    # The control of the property above: 64·64 plain float sums of 512 terms cannot all agree.
    a, b = generator(7).normal(size=(64, 512)), generator(8).normal(size=(512, 64))
    shuffled = generator(9).permutation(512)
    assert (a[:, shuffled] @ b[shuffled]).tobytes() != (a @ b).tobytes()


def test_exact_sum_takes_float_held_and_fixed_width_integers_along_any_axis():
    x = generator(10).integers(-(2**40), 2**40, (3, 4, 5))
    for held in (x, x.astype(np.float64)):
        for axis in (None, 0, 1, -1):
            assert np.array_equal(exact_sum(held, axis=axis), np.sum(x, axis=axis))
    assert exact_sum(x, axis=-1, keepdims=True).shape == (3, 4, 1)
    assert exact_sum(np.full(300, 255, dtype=np.uint8)) == 300 * 255
    assert exact_sum(np.full(2**13, 2.0**40)) == 2.0**53
    assert exact_sum(np.empty((0, 3)), axis=0).tolist() == [0.0, 0.0, 0.0]
