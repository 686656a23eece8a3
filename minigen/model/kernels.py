"""The hot loops of training in numpy and scipy: the readable reference of ``engines.Engine``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from minigen.exact.arithmetic import Floats, Integers, exact_sum, integer_exp
from minigen.model.head import Head, gaps, integer_gradient, log_partition, weight_bits
from minigen.model.parallel import blocks, in_parallel, shares
from minigen.model.rules import Formula


def one_hot(slots: Integers, rows: int) -> Any:
    """X, the sparse one-hot context matrix (N, R): a one in each column that ``slots`` names."""
    N, K = slots.shape
    starts = np.arange(0, N * K + 1, K)
    return csr_array((np.ones(N * K), slots.reshape(-1), starts), shape=(N, rows))


def scatter(d: Floats, slots: Integers, total: Floats) -> None:
    """See ``Engine``."""
    total += one_hot(slots, len(total)).T @ d


def gradients(logits: Floats, slots: Integers, head: Head, d: Floats) -> None:
    """See ``Engine``."""
    unit, bias, targets, scale, losses = head
    V = len(bias)
    for block in blocks(len(d), V):
        z = (one_hot(slots[block], len(logits)) @ logits) * unit + bias  # (n, V)
        below = gaps(z)
        w = integer_exp(below, weight_bits(V))
        S = exact_sum(w, axis=1)
        target = np.arange(len(w)), targets[block]
        losses[block] = below[target] + log_partition(S, V)
        w = integer_gradient(w, scale / S[:, None])
        w[target] -= scale
        d[block] = w


def elementwise(
    formula: Formula, arrays: Sequence[Floats], scalars: Sequence[float], out: Sequence[Floats]
) -> None:
    """See ``Engine``."""

    @np.errstate(over="ignore", invalid="ignore")  # the next step's range check tells
    def apply(part: slice) -> None:
        for block in whole[part]:
            new = formula(*(array[block] for array in arrays), *scalars)
            for array, value in zip(out, new, strict=True):
                array[block] = value

    whole = blocks(len(arrays[0]))
    in_parallel(apply, shares(len(whole), len(arrays[0]) // len(whole)))
