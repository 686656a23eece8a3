"""The loops of ``kernels``, compiled by numba: the same formulas and bits, row by row in cache."""
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np

from minigen.exact import arithmetic
from minigen.exact.arithmetic import Floats, Integers, exp_span, exp_table
from minigen.model import head, numba_cache, rules
from minigen.model.head import Head, weight_bits
from minigen.model.parallel import in_parallel, shares
from minigen.model.rules import Formula

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
_integer_gradient = _formula(head.integer_gradient)
_log_scaled = _formula(arithmetic.log_scaled)


@_formula
def _ordered(bits):
    """Turn a float's bits into an integer of the same order, or back: negatives are reversed."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@_loop
def scatter(d, slots, total):
    """See ``Engine``."""
    for n in range(len(d)):
        its = d[n]
        for slot in slots[n]:
            row = total[slot]
            row += its


@_loop
def _gradients(logits, slots, unit, bias, targets, scale, losses, powers, bits, span, d):
    K, V = slots.shape[1], len(bias)
    steps = np.empty(V, np.int32)
    lookup = steps.view(np.uint32)  # spares the test for negative indices
    scratch = np.empty(1, np.int64)
    for n in range(len(d)):
        row = d[n]
        part = logits[slots[n, 0]]
        for i in range(V):
            row[i] = part[i]
        for k in range(1, K - 1, 2):  # by twos, which takes half of the passes over ``row``
            part, other = logits[slots[n, k]], logits[slots[n, k + 1]]
            for i in range(V):
                row[i] += part[i] + other[i]
        for slot in slots[n, K - (K - 1) % 2 :]:  # perhaps one is left
            part = logits[slot]
            for i in range(V):
                row[i] += part[i]
        row_bits, largest = row.view(np.int64), np.int64(-1) << 63
        for i in range(V):
            row[i] = row[i] * unit + bias[i]
            largest = max(largest, _ordered(row_bits[i]))  # of floats, it would take longer
        scratch[0] = _ordered(largest)
        best = scratch.view(np.float64)[0]
        gap = best - row[targets[n]]
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
        mantissa, exponent = math.frexp(float(total))
        losses[n] = gap + _log_scaled(mantissa, exponent - bits)
        ratio = scale / total
        for i in range(V):
            row[i] = _integer_gradient(row[i], ratio)
        row[targets[n]] -= scale


@cache
def _elementwise_loop(formula: Any, inputs: int, outputs: int) -> Any:
    """Compile the loop of a formula: ``out0[i], … = formula(in0[i], …, *scalars)`` for each i."""
    names = [f"in{i}" for i in range(inputs)] + [f"out{i}" for i in range(outputs)]
    items = [f"{name}[i]" for name in names]
    source = (
        f"def {formula.__name__}({', '.join(names)}, *scalars):\n"
        f"    for i in range(len(in0)):\n"
        f"        {', '.join(items[inputs:])}, = formula({', '.join(items[:inputs])}, *scalars)\n"
    )
    known = {"formula": _formula(formula), "__name__": __name__}
    exec(compile(source, __file__, "exec"), known)  # a file's name, for numba's cache
    return _loop(known[formula.__name__])


def gradients(logits: Floats, slots: Integers, head: Head, d: Floats) -> None:
    """See ``Engine``."""
    bits = weight_bits(len(head.bias))
    _gradients(logits, slots, *head, exp_table(bits), bits, exp_span(bits), d)


def elementwise(
    formula: Formula, arrays: Sequence[Floats], scalars: Sequence[float], out: Sequence[Floats]
) -> None:
    """See ``Engine``."""
    loop = _elementwise_loop(formula, len(arrays), len(out))
    work = lambda part: loop(*(x[part] for x in (*arrays, *out)), *scalars)  # noqa: E731
    in_parallel(work, shares(len(arrays[0])))
