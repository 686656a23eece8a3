"""The self-check: whether this process computes as rule 1 and rule 2 of ``arithmetic`` assume.

A machine, or a library that was loaded, can break them in silence; so each model asks once, when it
is made. It costs about half a millisecond.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigen.errors import MinigenError
from minigen.exact.arithmetic import Floats, exact_matmul, grid_bits

_PROMISE = "one config, one fingerprint cannot be kept here"
_HALF_STEP = 2.0**-53  # half the distance from 1 to the next float
_SMALLEST = 2.0**-1022  # of the normal numbers
_LONGEST = 1 << 15  # terms of a sum, and numbers of a matrix, that are tried

# Chosen so that a result which is rounded to 64 bits first, and then to 53, is another one.
_ROUNDED_ONCE: Sequence[tuple[Callable[[Any, Any], Any], str, str, str]] = (
    (lambda a, b: a + b, "0x1.ec59aeef6a65bp+0", "0x1.b4e588df80058p-20", "0x1.ec59ca3dc2f3bp+0"),
    (lambda a, b: a * b, "0x1.4dcfc135bf67bp+0", "0x1.7436da6419a11p+0", "0x1.e5596b5a4c939p+0"),
    (lambda a, b: a / b, "0x1.17f54ca3b0d32p+0", "0x1.fb356c3134c37p+0", "0x1.1a9a51bee1a23p-1"),
)
_MODES = {  # (1 + half a step, 1 + three quarters of one, the same of -1) in steps from ±1
    (0, 1, 1): "",
    (1, 1, 0): "upwards",
    (0, 0, 1): "downwards",
    (0, 0, 0): "towards zero",
}

Multiply = Callable[[Floats, Floats], Floats]


def check(longest_sum: int, columns: int, multiply: Multiply = exact_matmul) -> None:
    """Raise MinigenError, one line that names the cause, where the bits would not be ours.

    ``longest_sum`` and ``columns`` are those of the model's products, as far as they can be tried
    in a moment.
    """
    with np.errstate(all="ignore"):
        for whose, number in (("Python's", float), ("numpy's", lambda x: np.full(5, x))):
            if fault := fault_of_numbers(number):
                raise MinigenError(f"{_PROMISE}: {whose} {fault}")
        if not _multiplies_exactly(longest_sum, columns, multiply):
            raise MinigenError(
                f"{_PROMISE}: numpy's BLAS does not add products of integers exactly; install "
                "another (numpy.show_config() names it)"
            )


def fault_of_numbers(number: Callable[[float], Any]) -> str:
    """Say what is wrong with one kind of float, made by ``number``; an empty text if nothing.

    Operands pass through ``number``, so that no compiler computes beforehand.
    """
    one, step = number(1.0), 2 * _HALF_STEP
    half, more = number(_HALF_STEP), number(1.5 * _HALF_STEP)
    steps = ((one + half) - one, (one + more) - one, -((-one - more) + one))
    mode = _MODES.get(tuple(_scalar(x) / step for x in steps), "in an unknown way")
    if mode:
        return (
            f"floats are rounded {mode}, not to the nearest: something in this process has called "
            "fesetround; start without it"
        )
    if not _scalar(number(_SMALLEST) * number(0.5)) > 0.0:
        return (
            "subnormal floats are flushed to zero: a library in this process was built with "
            "-ffast-math and has set it; start without it"
        )
    for operation, a, b, right in _ROUNDED_ONCE:
        result = operation(number(float.fromhex(a)), number(float.fromhex(b)))
        if _scalar(result) != float.fromhex(right):
            return (
                "floats are rounded twice (x87 arithmetic of 32-bit x86, most often): use a 64-bit "
                "build, or one for SSE2"
            )
    return ""


def _scalar(x: Any) -> Any:
    """Return the one value of an array of equals, or NaN; a number as it is."""
    if not isinstance(x, np.ndarray):
        return x
    return float(x[0]) if (x == x[0]).all() else float("nan")


def _multiplies_exactly(longest_sum: int, columns: int, multiply: Multiply) -> bool:
    """Multiply integers whose sums reach 2^53, and others, against numpy's own integers."""
    inner = min(longest_sum, _LONGEST)
    rows, side = min(8, _LONGEST // inner), max(1, min(columns, 64, _LONGEST // inner))
    largest = (1 << grid_bits(inner)) - 1  # odd, so that the last bit counts
    numbers = np.arange((rows + side) * inner, dtype=np.int64) * 2_654_435_761
    numbers = numbers % (2 * largest + 1) - largest
    a, b = numbers[: rows * inner].reshape(rows, inner), numbers[rows * inner :].reshape(inner, -1)
    a[0], b[:, 0] = largest, largest  # the worst case: every term at its limit, one sign
    right = np.matmul(a, b)  # (rows, side), of int64: exact, and no BLAS
    x, y = a.astype(np.float64), b.astype(np.float64)
    return bool((multiply(x, y) == right).all() and (multiply(y.T, x.T) == right.T).all())
