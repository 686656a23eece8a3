"""Arithmetic whose bits do not depend on the machine: exp, log, cos, integer grids, exact sums.

Three rules make it so, and everything above this file obeys them:

1. elementwise IEEE-754 only (``+ - * /``, square root, ``rint``, comparisons, powers of two);
2. every sum whose order a library chooses adds integers held in float64 that stay below 2**53,
   so that it is exact and its order cannot matter;
3. random numbers are raw words of a counter (``streams.py``).

The formulas are written once for arrays and scalars alike, so that a compiler can use them too.
"""

from functools import cache
from math import frexp, isqrt, ldexp
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minigen.errors import MinigenError, OptionError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# ln 2 and π/2 as integers: the first 128 bits behind the binary point, and two before it.
_LN2 = 0xB17217F7D1CF79ABC9E3B39803F2F6AF
_HALF_PI = 0x3243F6A8885A308D313198A2E03707344 >> 1

_STEPS = 1024  # exp's table holds 2^(j/1024): a cubic is then enough for what is left
_EXPONENT_LIMIT = 400  # grids take magnitudes below 2^400, so that no product of units overflows
_COS_LIMIT = ldexp(1.0, 20)


def _leading_bits(value: int, scale: int, bits: int) -> tuple[float, int]:
    """Split off the leading ``bits`` bits of value·2^-scale as a float; return it and the rest."""
    shift = value.bit_length() - bits
    head = value >> shift << shift
    return head / (1 << scale), value - head


_STEPS_PER_NAT = (_STEPS << 128) / _LN2
_STEP_HIGH, _rest = _leading_bits(_LN2, 128 + 10, 32)  # k·high is exact for |k| < 2^21
_STEP_LOW = _rest / (1 << (128 + 10))
_LN2_HIGH, _rest = _leading_bits(_LN2, 128, 42)  # k·high is exact for |k| < 2^11
_LN2_LOW = _rest / (1 << 128)
_HALF_PI_HIGH, _rest = _leading_bits(_HALF_PI, 128, 32)  # n·high and n·middle: |n| < 2^20
_HALF_PI_MIDDLE, _rest = _leading_bits(_rest, 128, 32)
_HALF_PI_LOW = _rest / (1 << 128)


def _roots_of_two() -> Floats:
    """2^(j/1024) for j = 0 … 1023, each correctly rounded: integer square roots, then products."""
    root = 2 << 128
    for _ in range(10):
        root = isqrt(root << 128)
    powers = [1 << 128]
    while len(powers) < _STEPS:
        powers.append(powers[-1] * root >> 128)
    return np.array([power / (1 << 128) for power in powers])


_ROOTS = _roots_of_two()
_ROOT_OF_HALF = float(_ROOTS[_STEPS // 2]) * 0.5


def exp_remainder(gap: Any, step: Any) -> Any:
    """exp(step·ln 2/1024 − gap) by its cubic, for exponents within ±ln 2/2048: error 6·10⁻¹⁶."""
    r = (step * _STEP_HIGH - gap) + step * _STEP_LOW
    return 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0)))


def exp_step(x: Any) -> Any:
    """Return the step for which step·ln 2/1024 is nearest to x, as a float."""
    return np.rint(x * _STEPS_PER_NAT)


def exp(x: ArrayLike) -> Any:
    """e^x, elementwise; float64 of the same shape; relative error below 10⁻¹⁴.

    exp(−inf) = 0, exp(inf) = inf, NaN gives NaN; results below 2^-1022 are rounded to subnormals,
    above the largest float they are inf. No warning is raised. Source: x = k·ln 2/1024 + r, table
    of 2^(j/1024), cubic in r (P. T. P. Tang, ACM TOMS 15(2), 1989).
    """
    x = np.asarray(x, dtype=np.float64)
    is_nan = x != x
    clamped = np.where(is_nan, 0.0, np.minimum(np.maximum(x, -746.0), 710.0))
    step = exp_step(clamped)
    mantissa = exp_remainder(-clamped, -step)
    k = step.astype(np.int64)
    exponent = k >> 10
    half = exponent >> 1  # in two parts: the first product is exact, the second rounds once
    with np.errstate(over="ignore", under="ignore"):
        mantissa = mantissa * _ROOTS[k & (_STEPS - 1)] * np.ldexp(1.0, half)
        result = mantissa * np.ldexp(1.0, exponent - half)
    return np.where(is_nan, np.nan, result)[()]


@cache
def exp_table(bits: int) -> Floats:
    """2^(bits − m/1024), m = 0, 1, … to the end of ``exp_span`` and beyond. Read-only."""
    octaves = np.ldexp(1.0, bits - np.arange(bits + 3))  # (bits + 3,)
    descending = np.append(1.0, 0.5 * _ROOTS[:0:-1])  # 2^(-m/1024), (1024,)
    table: Floats = (octaves[:, None] * descending).ravel()
    table.flags.writeable = False
    return table


def exp_span(bits: int) -> float:
    """Return the gap from which on ``integer_exp`` is 0: about (bits + 2)·ln 2."""
    return (bits + 2) * _LN2_HIGH


def integer_exp(gap: Floats, bits: int) -> Floats:
    """rint(exp(−gap)·2^bits) for gaps ≥ 0 (inf included): integers held in float64.

    The same bits as ``np.rint(exp(-gap) * 2**bits)`` with a third of the passes: it is the heart
    of every softmax here.
    """
    gap = np.minimum(gap, exp_span(bits))
    step = exp_step(gap)
    # exp(−gap) = 2^(−step/1024)·exp(step·ln 2/1024 − gap)
    remainder = exp_remainder(gap, step)
    weight: Floats = np.rint(remainder * exp_table(bits).take(step.astype(np.int64)))
    return weight


def log_scaled(mantissa: Any, k: Any) -> Any:
    """ln(mantissa·2^k) for ½ ≤ mantissa < 1, as ``frexp`` gives them: the heart of ``log``."""
    is_small = mantissa < _ROOT_OF_HALF
    f = mantissa * (1.0 + is_small) - 1.0
    k = k - is_small
    s = f / (2.0 + f)
    square = s * s
    series = 0.0 * s
    for n in range(10, 0, -1):
        series = square * (2.0 / (2 * n + 1) + series)
    return k * _LN2_HIGH + (f - (s * (f - series) - k * _LN2_LOW))


def log(x: ArrayLike) -> Any:
    """Natural logarithm, elementwise; float64 of the same shape; within 4 units in the last place.

    log(0) = −inf, log(inf) = inf, negative numbers and NaN give NaN; subnormals are exact inputs
    like any other. No warning is raised. Source: x = 2^k·(1 + f), √½ ≤ 1 + f < √2,
    log(1 + f) = 2·artanh(f/(2 + f)) = f − s·(f − R(s²)) with s = f/(2 + f).
    """
    x = np.asarray(x, dtype=np.float64)
    is_regular = (x > 0.0) & (x < np.inf)
    result = log_scaled(*np.frexp(np.where(is_regular, x, 1.0)))
    special = np.where(x == 0.0, -np.inf, np.where(x == np.inf, np.inf, np.nan))
    return np.where(is_regular, result, special)[()]


def cos(x: ArrayLike) -> Any:
    """Cosine of x in radians, elementwise, for |x| ≤ 2^20; absolute error below 10⁻¹⁵.

    The learning rate falls along it. NaN and ±inf give NaN; larger finite numbers raise
    OptionError, since the reduction would lose bits. Source: x = n·π/2 + r with π/2 in three parts
    (Cody and Waite 1980), Taylor series in r.
    """
    x = np.asarray(x, dtype=np.float64)
    is_finite = np.isfinite(x)
    x = np.where(is_finite, x, 0.0)
    if np.any(np.abs(x) > _COS_LIMIT):
        raise OptionError(f"cos takes |x| up to 2^20 (got {float(np.max(np.abs(x)))!r})")
    n = np.rint(x * ((1 << 128) / _HALF_PI))
    r = ((x - n * _HALF_PI_HIGH) - n * _HALF_PI_MIDDLE) - n * _HALF_PI_LOW
    square = r * r
    cosine, sine = np.ones_like(r), np.ones_like(r)  # Taylor, innermost factor first
    for i in range(17, 0, -2):
        cosine = 1.0 - square / (i * (i + 1)) * cosine
        sine = 1.0 - square / ((i + 1) * (i + 2)) * sine
    quadrant = n.astype(np.int64) & 3
    magnitude = np.where(quadrant & 1, r * sine, cosine)
    result = np.where((quadrant == 1) | (quadrant == 2), -magnitude, magnitude)
    return np.where(is_finite, result, np.nan)[()]


def ceil_log2(n: int) -> int:
    """⌈log₂ n⌉ for n ≥ 1."""
    return (n - 1).bit_length()


def grid_bits(longest_sum: int) -> int:
    """Bits of a grid whose products, ``longest_sum`` of them, add up to at most 2^53."""
    return (53 - ceil_log2(longest_sum)) // 2


def grid_unit(largest: float, bits: int) -> float:
    """Return the smallest power of two by which magnitudes up to ``largest`` are ≤ 2^bits."""
    if not largest < ldexp(1.0, _EXPONENT_LIMIT):
        raise MinigenError(f"magnitudes must be finite and below 2^400 (got {largest!r})")
    mantissa, exponent = frexp(largest)
    exponent -= mantissa == 0.5  # 2^bits itself counts as inside, so that rounding twice is once
    return ldexp(1.0, max(exponent, -_EXPONENT_LIMIT) - bits)


def largest_magnitude(x: Floats) -> float:
    """Return max |x|: NaN if one is there, 0 if x is empty."""
    return max(float(np.max(x)), -float(np.min(x))) if x.size else 0.0


def round_to_grid(x: Floats, bits: int) -> tuple[Floats, float]:
    """Round x once to integers of ``bits`` bits times one power of two.

    Returns (integers held in float64, |integers| ≤ 2^bits; unit): x ≈ integers·unit, off by half
    a unit at most. Rounding what lies on such a grid already changes nothing.
    """
    unit = grid_unit(largest_magnitude(x), bits)
    return np.rint(x * (1.0 / unit)), unit


def to_two_grids(x: Any, per_unit: float, per_other: float) -> tuple[Any, Any]:
    """Round x once to each of two grids, of units 1/per_unit and 1/per_other: ``round_to_grid``."""
    return np.rint(x * per_unit), np.rint(x * per_other)


def integer_square(x: Any, per_unit: float, scale: float) -> tuple[Any]:
    """rint((x/unit)²·scale): a square on a grid, so that squares add up exactly."""
    x = x * per_unit
    return (np.rint(x * x * scale),)


def exact_matmul(a: Floats, b: Floats, out: Floats | None = None) -> Floats:
    """a·b of integer-valued operands, sums of magnitudes within 2^53: same bits in any order."""
    return np.matmul(a, b, out=out)


def exact_sum(x: NDArray[Any], axis: int | None = None, keepdims: bool = False) -> Any:
    """Sum of integers: float64-held within 2^53, or int64. Exact, hence the same in any order."""
    return np.add.reduce(x, axis=axis, keepdims=keepdims)  # type: ignore[call-overload]
