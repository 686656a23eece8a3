"""The hot loops of training: one-hot products and softmax over a batch, optimizer over all weights.

Here in numpy and scipy, as the readable reference; ``kernels_numba`` compiles the same formulas.
Nothing in them depends on order, so the two agree bit for bit and speed alone decides.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from minigen.arithmetic import Floats, exact_sum, integer_exp
from minigen.head import gaps, integer_gradient, integer_losses, log_partition, weight_bits

Integers = NDArray[np.int64]

_BLOCK = 1 << 14  # elements that stay in cache from pass to pass


def _blocks(rows: int, row_size: int = 1) -> Iterator[slice]:
    height = max(1, _BLOCK // row_size)
    return (slice(start, start + height) for start in range(0, rows, height))


def one_hot_contexts(slots: Integers, rows: int) -> Any:
    """X, the sparse one-hot context matrix (N, rows·K): K ones a row, at slot·K + position."""
    N, K = slots.shape
    columns = slots * K + np.arange(K)  # (N, K)
    starts = np.arange(0, N * K + 1, K)
    return csr_array((np.ones(N * K), columns.reshape(-1), starts), shape=(N, rows * K))


def statistics(
    table: Floats, unit: float, bias: Floats, slots: Integers, targets: Integers, scale: float
) -> tuple[Floats, int]:
    """Sum the gradient of the table and the loss over a batch; both are integers.

    table (U, K, V) integer-valued, ``unit`` its step; bias (V,); slots (N, K) rows of the table;
    targets (N,); scale G. Returns dT (U, K, V) in steps of 1/G and Σ nll in ``head.LOSS_UNIT``.
    """
    U, K, V = table.shape
    X = one_hot_contexts(slots, U)
    d = X @ table.reshape(U * K, V)  # (N, V): integer logits, overwritten by their gradient
    losses = np.empty(len(targets))
    for block in _blocks(len(targets), V):
        y = targets[block, None]  # (n, 1)
        gap = gaps(d[block] * unit + bias)  # (n, V)
        w = integer_exp(gap, weight_bits(V))
        S = exact_sum(w, axis=1, keepdims=True)  # (n, 1)
        losses[block] = (np.take_along_axis(gap, y, axis=1) + log_partition(S, V))[:, 0]
        gradient = integer_gradient(w, scale / S)
        gradient[np.arange(len(y)), y[:, 0]] -= scale
        d[block] = gradient
    dT = (X.T @ d).reshape(U, K, V)
    return dT, int(exact_sum(integer_losses(losses)))


def update(
    rule: Callable[..., tuple[Any, ...]],
    weights: Floats,
    gradient: Floats,
    moments: tuple[Floats, ...],
    scalars: tuple[float, ...],
) -> None:
    """Apply an elementwise rule of the optimizer in place: (weights, *moments) = rule(…)."""
    for block in _blocks(len(weights)):
        new = rule(
            weights[block], gradient[block], *(moment[block] for moment in moments), *scalars
        )
        for old, value in zip((weights, *moments), new, strict=True):
            old[block] = value
