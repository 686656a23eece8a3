"""The loops of ``kernels``, compiled by numba: the same formulas and bits, row by row in cache."""
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

import hashlib
from functools import cache
from typing import Any

import numba
import numpy as np

from minigen.exact import arithmetic
from minigen.exact.arithmetic import Floats, Integers, exact_sum, exp_span, exp_table
from minigen.model import head, numba_cache, rules
from minigen.model.head import weight_bits
from minigen.model.parallel import in_parallel, scratch
from minigen.model.rules import UpdateRule

BLOCK = 1 << 16  # they stay in cache from one loop to the next

# Numba's cache on disk looks at a loop's own file; so the loop's name says which formulas went in.
# They are read as bytes, since an installation may hold compiled files alone, or be an archive.
_MODULES: Any = (arithmetic, head, rules)
_FORMULAS = hashlib.sha256(
    b"".join(module.__loader__.get_data(module.__file__) for module in _MODULES)
).hexdigest()[:16]


def _formula(function: Any) -> Any:
    return numba.njit(function, error_model="numpy")


def _loop(function: Any) -> Any:
    function.__qualname__ += f"-{_FORMULAS}"
    compiled = numba.njit(function, error_model="numpy", fastmath=False, nogil=True)
    numba_cache.enable(compiled)
    return compiled


_exp_step = _formula(arithmetic.exp_step)
_exp_remainder = _formula(arithmetic.exp_remainder)
_integer_square = _formula(arithmetic.integer_square)
_integer_gradient = _formula(head.integer_gradient)


@_loop
def _sum_of_squares(x, per_unit, scale):
    total = 0
    for i in range(len(x)):
        total += np.int64(_integer_square(x[i], per_unit, scale))
    return total


@_loop
def _largest(row, scratch):
    """max(row), from the bits: as integers they are ordered alike, negative numbers reversed."""
    bits = row.view(np.int64)
    largest = np.int64(-1) << 63
    for i in range(len(bits)):
        largest = max(largest, bits[i] ^ ((bits[i] >> 63) & 0x7FFFFFFFFFFFFFFF))
    scratch[0] = largest ^ ((largest >> 63) & 0x7FFFFFFFFFFFFFFF)
    return scratch.view(np.float64)[0]


@_loop
def _gather(table, slots, z):
    for n in range(len(z)):
        row = z[n]
        row[:] = table[slots[n, 0]]
        for slot in slots[n, 1:]:
            row += table[slot]


@_loop
def _scatter(d, slots, total):
    for n in range(len(d)):
        for slot in slots[n]:
            row = total[slot]
            row += d[n]


@_loop
def _gradients(z, unit, bias, targets, scale, powers, span, gap, S):
    """Fill each row of z with its prediction's gradient; gap and S are what the loss needs."""
    V = len(bias)
    steps = np.empty(V, np.int32)
    lookup = steps.view(np.uint32)  # spares the test for negative indices
    scratch = np.empty(1, np.int64)
    for n in range(len(z)):
        row = z[n]
        for i in range(V):
            row[i] = row[i] * unit + bias[i]
        best = _largest(row, scratch)
        gap[n] = best - row[targets[n]]
        for i in range(V):
            clamped = min(best - row[i], span)
            step = _exp_step(clamped)
            steps[i] = np.int32(step)
            row[i] = _exp_remainder(clamped, step)
        for i in range(V):
            row[i] = np.rint(row[i] * powers[lookup[i]])
        total = 0
        for i in range(V):
            total += np.int64(row[i])
        S[n] = total
        ratio = scale / S[n]
        for i in range(V):
            row[i] = _integer_gradient(row[i], ratio)
        row[targets[n]] -= scale


@cache
def _update_loop(rule: UpdateRule) -> Any:
    """Compile the loop of an update rule.

    For one moment m: ``new_p[i], new_m[i] = formula(p[i], g[i], m[i], …)`` for each i.
    """
    old, new = ["p", "g", *rule.moments], [f"new_{name}" for name in ("p", *rule.moments)]
    source = (
        f"def {rule.formula.__name__}({', '.join(old + new)}, *scalars):\n"
        f"    for i in range(len(p)):\n"
        f"        {', '.join(f'{name}[i]' for name in new)} = "
        f"formula({', '.join(f'{name}[i]' for name in old)}, *scalars)\n"
    )
    names = {"formula": _formula(rule.formula), "__name__": __name__}
    exec(compile(source, __file__, "exec"), names)  # a file's name, for numba's cache
    return _loop(names[rule.formula.__name__])


def gather(table: Floats, slots: Integers) -> Floats:
    """See ``Engine``."""
    z = scratch("logits", len(slots), table.shape[1])
    _gather(table, slots, z)
    return z


def scatter(d: Floats, slots: Integers, total: Floats) -> None:
    """See ``Engine``."""
    _scatter(d, slots, total)


def gradients(
    z: Floats,
    unit: float,
    bias: Floats,
    targets: Integers,
    scale: float,
    gap: Floats,
    S: Floats,
) -> None:
    """See ``Engine``."""
    bits = weight_bits(len(bias))
    _gradients(z, unit, bias, targets, scale, exp_table(bits), exp_span(bits), gap, S)


def sum_of_squares(x: Floats, per_unit: float, scale: float) -> float:
    """See ``Engine``."""
    sums = in_parallel(lambda part: _sum_of_squares(x[part], per_unit, scale), len(x))
    return float(exact_sum(np.array(sums)))


def update(
    rule: UpdateRule,
    weights: Floats,
    gradient: Floats,
    moments: tuple[Floats, ...],
    scalars: tuple[float, ...],
    out: tuple[Floats, ...],
) -> None:
    """See ``Engine``."""
    loop = _update_loop(rule)
    arrays = (weights, gradient, *moments, *out)
    in_parallel(lambda part: loop(*(array[part] for array in arrays), *scalars), len(weights))
