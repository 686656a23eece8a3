"""The hot loops of training in numpy and scipy: the readable reference of ``engines.Engine``."""

from typing import Any

import numpy as np
from scipy.sparse import csr_array

from minigen.exact.arithmetic import Floats, Integers, exact_sum, integer_exp, integer_square
from minigen.model.head import gaps, integer_gradient, weight_bits
from minigen.model.parallel import blocks, in_parallel
from minigen.model.rules import UpdateRule

BLOCK = 1 << 20


def one_hot(slots: Integers, rows: int) -> Any:
    """X, the sparse one-hot context matrix (N, R): a one in each column that ``slots`` names."""
    N, K = slots.shape
    starts = np.arange(0, N * K + 1, K)
    return csr_array((np.ones(N * K), slots.reshape(-1), starts), shape=(N, rows))


def gather(table: Floats, slots: Integers) -> Floats:
    """See ``Engine``."""
    z: Floats = one_hot(slots, len(table)) @ table
    return z


def scatter(d: Floats, slots: Integers, total: Floats) -> None:
    """See ``Engine``."""
    total += one_hot(slots, len(total)).T @ d


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
    V = len(bias)
    for block in blocks(slice(0, len(z)), V):
        below = gaps(z[block] * unit + bias)  # (n, V)
        w = integer_exp(below, weight_bits(V))
        S[block] = exact_sum(w, axis=1)
        target = np.arange(len(w)), targets[block]
        gap[block] = below[target]
        d = integer_gradient(w, scale / S[block, None])
        d[target] -= scale
        z[block] = d


def sum_of_squares(x: Floats, per_unit: float, scale: float) -> float:
    """See ``Engine``."""

    def squares(part: slice) -> list[float]:
        return [exact_sum(integer_square(x[block], per_unit, scale)) for block in blocks(part)]

    return float(exact_sum(np.concatenate(in_parallel(squares, len(x)))))


def update(
    rule: UpdateRule,
    weights: Floats,
    gradient: Floats,
    moments: tuple[Floats, ...],
    scalars: tuple[float, ...],
    out: tuple[Floats, ...],
) -> None:
    """See ``Engine``."""

    @np.errstate(over="ignore", invalid="ignore")  # the next step's range check tells
    def apply(part: slice) -> None:
        for block in blocks(part):
            new = rule.formula(
                weights[block], gradient[block], *(moment[block] for moment in moments), *scalars
            )
            for array, value in zip(out, new, strict=True):
                array[block] = value

    in_parallel(apply, len(weights))
