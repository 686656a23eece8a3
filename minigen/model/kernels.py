"""The hot loops of training: rounding, one-hot products with softmax, the optimizer's update.

Here in numpy and scipy, as the readable reference; ``kernels_numba`` compiles the same formulas.
Nothing in them depends on order, so the two agree bit for bit and ``engine`` goes by speed alone.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from threadpoolctl import ThreadpoolController

from minigen.exact.arithmetic import Floats, exact_sum, integer_exp, integer_square
from minigen.model.head import gaps, integer_gradient, log_partition, total_loss, weight_bits

Integers = NDArray[np.int64]

_BLOCK = 1 << 14  # elements that stay in cache from pass to pass
GRAIN = 1 << 16  # elements below which a second thread costs more than it saves


@cache
def engine() -> ModuleType:
    """``kernels_numba`` where numba is installed (``minigen[fast]``), else this module."""
    try:
        return import_module("minigen.model.kernels_numba")
    except ImportError:
        return sys.modules[__name__]


@cache
def resources() -> tuple[int, ThreadPoolExecutor, Any]:
    """Return the number of threads (as many as BLAS was allowed), those that help, and BLAS."""
    blas = ThreadpoolController().select(user_api="blas")
    threads = max((library["num_threads"] for library in blas.info()), default=os.cpu_count() or 1)
    return threads, ThreadPoolExecutor(max(1, threads - 1)), blas


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=resources.cache_clear)  # a forked process has no threads


def in_parallel(work: Callable[[slice], Any], size: int, weight: int = 1) -> list[Any]:
    """[work(part), …] over equal parts of range(size), a thread each; an item is ``weight`` big."""
    threads, helpers, _ = resources()
    parts = max(1, min(threads, size, size * weight // GRAIN))
    slices = [slice(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
    others = [helpers.submit(work, part) for part in slices[1:]]
    return [work(slices[0]), *(other.result() for other in others)]


def multiply(work: Callable[..., None], items: Sequence[tuple[Any, ...]], size: int) -> None:
    """work(*item) for all items, in parallel: matrix products of ``size`` multiplications in all.

    BLAS is held at one thread meanwhile: its own and ours would fight over the same cores.
    """

    def products(part: slice) -> None:
        for item in items[part]:
            work(*item)

    _, _, blas = resources()
    with blas.limit(limits=1):
        in_parallel(products, len(items), size // len(items) // 16)


def blocks(part: slice, row_size: int = 1, block_size: int = _BLOCK) -> Iterator[slice]:
    """Cut a slice of rows into slices of about ``block_size`` elements."""
    height = max(1, block_size // row_size)
    for start in range(part.start, part.stop, height):
        yield slice(start, min(start + height, part.stop))


def one_hot_contexts(slots: Integers, rows: int) -> Any:
    """X, the sparse one-hot context matrix (N, R): a one in each column that ``slots`` names."""
    N, K = slots.shape
    starts = np.arange(0, N * K + 1, K)
    return csr_array((np.ones(N * K), slots.reshape(-1), starts), shape=(N, rows))


def statistics(
    table: Floats, unit: float, bias: Floats, slots: Integers, targets: Integers, scale: float
) -> tuple[Floats, int]:
    """Sum the gradient of the table and the loss over a batch; both are integers.

    table (R, V) integer-valued, ``unit`` its step; bias (V,); slots (N, K) rows of the table;
    targets (N,); scale G. Returns dT (R, V) in steps of 1/G and Σ nll in ``head.LOSS_UNIT``.
    """
    R, V = table.shape
    losses = np.empty(len(targets))

    def of(part: slice) -> Floats:
        X = one_hot_contexts(slots[part], R)
        d = X @ table  # (n, V): integer logits, overwritten by their gradient
        for block in blocks(slice(0, len(d)), V):
            y = targets[part][block, None]  # (n, 1)
            gap = gaps(d[block] * unit + bias)  # (n, V)
            w = integer_exp(gap, weight_bits(V))
            S = exact_sum(w, axis=1, keepdims=True)  # (n, 1)
            nll = np.take_along_axis(gap, y, axis=1) + log_partition(S, V)
            losses[part][block] = nll[:, 0]
            gradient = integer_gradient(w, scale / S)
            gradient[np.arange(len(y)), y[:, 0]] -= scale
            d[block] = gradient
        dT: Floats = X.T @ d  # (R, V)
        return dT

    dT, *others = in_parallel(of, len(targets), slots.shape[1] * V)
    for other in others:
        dT += other
    return dT, total_loss(losses)


def sum_of_squares(x: Floats, per_unit: float, scale: float) -> float:
    """Σ ``arithmetic.integer_square`` over a flat array."""

    def of(part: slice) -> list[float]:
        return [exact_sum(integer_square(x[block], per_unit, scale)) for block in blocks(part)]

    return float(exact_sum(np.concatenate(in_parallel(of, len(x)))))


def update(
    rule: Callable[..., tuple[Any, ...]],
    weights: Floats,
    gradient: Floats,
    moments: tuple[Floats, ...],
    scalars: tuple[float, ...],
) -> None:
    """Apply an elementwise rule of the optimizer in place: (weights, *moments) = rule(…)."""

    @np.errstate(over="ignore", invalid="ignore")  # the next step's range check tells
    def of(part: slice) -> None:
        for block in blocks(part):
            new = rule(
                weights[block], gradient[block], *(moment[block] for moment in moments), *scalars
            )
            for old, value in zip((weights, *moments), new, strict=True):
                old[block] = value

    in_parallel(of, len(weights))
