"""The loops of ``kernels``, compiled: the same formulas and the same bits, row by row in cache."""
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

import hashlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np

from minigen.exact import arithmetic
from minigen.exact.arithmetic import Floats, exact_sum, exp_span, exp_table
from minigen.model import head, rules
from minigen.model.head import log_partition, total_loss, weight_bits
from minigen.model.kernels import Integers, blocks, in_parallel

_BLOCK = 1 << 20  # logits that should stay in cache from one loop over a batch to the next

# Numba's cache on disk looks at a loop's own file; so the loop's name says which formulas went in.
_FORMULAS = hashlib.sha256(
    "".join(inspect.getsource(module) for module in (arithmetic, head, rules)).encode()
).hexdigest()[:16]


def _formula(function: Any) -> Any:
    return numba.njit(function, error_model="numpy")


def _loop(function: Any) -> Any:
    function.__qualname__ += f"-{_FORMULAS}"
    compiled = numba.njit(function, error_model="numpy", fastmath=False, nogil=True)
    with suppress(RuntimeError, AttributeError):  # no folder to write to; NUMBA_DISABLE_JIT
        compiled.enable_caching()
    return compiled


_exp_step = _formula(arithmetic.exp_step)
_exp_remainder = _formula(arithmetic.exp_remainder)
_integer_square = _formula(arithmetic.integer_square)
_integer_gradient = _formula(head.integer_gradient)
_adamw = _formula(rules.adamw)
_sgd = _formula(rules.sgd)


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
def _gradients(table, unit, bias, scale, powers, span, slots, targets, d, gap, S):
    """Fill each row of d with its prediction's gradient; gap and S are what the loss needs."""
    V = len(bias)
    steps = np.empty(V, np.int32)
    lookup = steps.view(np.uint32)  # spares the test for negative indices
    scratch = np.empty(1, np.int64)
    for n in range(len(d)):
        row = d[n]
        row[:] = table[slots[n, 0]]
        for slot in slots[n, 1:]:
            row += table[slot]
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


@_loop
def _scatter(d, slots, dT, start, stop):
    """Add each row of d to its K rows of dT, in the columns from start to stop."""
    for n in range(len(d)):
        row = d[n, start:stop]
        for slot in slots[n]:
            total = dT[slot, start:stop]
            total += row


@_loop
def _update_adamw(p, g, m, v, clip, keep, beta1, beta2, rate, spread):
    for i in range(len(p)):
        p[i], m[i], v[i] = _adamw(p[i], g[i], m[i], v[i], clip, keep, beta1, beta2, rate, spread)


@_loop
def _update_sgd(p, g, momentum, clip, keep, decay, rate):
    for i in range(len(p)):
        p[i], momentum[i] = _sgd(p[i], g[i], momentum[i], clip, keep, decay, rate)


def sum_of_squares(x: Floats, per_unit: float, scale: float) -> float:
    """``kernels.sum_of_squares``."""
    sums = in_parallel(lambda part: _sum_of_squares(x[part], per_unit, scale), len(x))
    return float(exact_sum(np.array(sums)))


def statistics(
    table: Floats, unit: float, bias: Floats, slots: Integers, targets: Integers, scale: float
) -> tuple[Floats, int]:
    """``kernels.statistics``."""
    (N, K), V = slots.shape, len(bias)
    bits = weight_bits(V)
    formula = (table, unit, bias, scale, exp_table(bits), exp_span(bits))
    dT = np.zeros(table.shape)
    gap, S = np.empty(N), np.empty(N)
    d = np.empty((min(N, max(1, _BLOCK // V)), V))
    for block in blocks(slice(0, N), V, _BLOCK):
        rows = (slots[block], targets[block], d[: block.stop - block.start], gap[block], S[block])

        def gradients(part: slice, rows: Any = rows) -> None:
            _gradients(*formula, *(array[part] for array in rows))

        def scatter(part: slice, rows: Any = rows) -> None:
            slots, _, d, _, _ = rows
            _scatter(d, slots, dT, part.start, part.stop)

        in_parallel(gradients, block.stop - block.start, K * V)
        in_parallel(scatter, V, (block.stop - block.start) * K)
    return dT, total_loss(gap + log_partition(S, V))


def update(
    rule: Callable[..., tuple[Any, ...]],
    weights: Floats,
    gradient: Floats,
    moments: tuple[Floats, ...],
    scalars: tuple[float, ...],
) -> None:
    """``kernels.update``."""
    loop = {rules.adamw: _update_adamw, rules.sgd: _update_sgd}[rule]
    arrays = (weights, gradient, *moments)
    in_parallel(lambda part: loop(*(array[part] for array in arrays), *scalars), len(weights))
