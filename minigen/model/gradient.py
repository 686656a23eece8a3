"""The gradient of a batch is one vector of integers, so parts of a batch add up in any order.

Two ways to compute it, by contexts and by table, add the same integers: the same bits.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ldexp
from typing import NamedTuple

import numpy as np

from minigen.errors import OptionError
from minigen.exact.arithmetic import Floats, Integers, exact_matmul, exact_sum
from minigen.model import engines
from minigen.model.head import LOSS_UNIT, log_partition, total_loss
from minigen.model.parallel import accumulate, blocks, in_parallel, scratch

PASSES = 20  # what the table's two passes over a row cost, in products of three matrices


class Grids(NamedTuple):
    """E (V, D) and W, here (K, D, V), as integers, each with the power of two that is its unit."""

    E: Floats
    E_unit: float
    W: Floats
    W_unit: float


@dataclass(frozen=True)
class Statistics:
    """What a batch says: integers, so blocks, threads, parts and workers add up in any order.

    vector (P,) holds dE, dW and db, laid out like the parameters, in steps of ``gradient_bits``;
    loss in ``head.LOSS_UNIT``; count of predictions seen, of the ``step_size`` of the whole step.
    """

    vector: Floats
    loss: int
    count: int
    step_size: int

    def __add__(self, other: "Statistics") -> "Statistics":
        if self.step_size != other.step_size:
            raise OptionError(
                "statistics of one step add up, so step_size must be the same "
                f"(got {self.step_size} and {other.step_size})"
            )
        loss, count = self.loss + other.loss, self.count + other.count
        return Statistics(self.vector + other.vector, loss, count, self.step_size)

    @property
    def mean_loss(self) -> float:
        """Mean negative log-likelihood in nats."""
        return self.loss / self.count * LOSS_UNIT


def is_cheaper_by_table(tokens: int, rows: int, embedding_dim: int) -> bool:
    """Whether a table of so many rows is worth it for N·K tokens in contexts.

    Each row fewer saves three times D products, and each token costs two passes over its row.
    """
    return embedding_dim * (tokens - rows) > PASSES * tokens


class Batch:
    """Predictions, contexts (N, K) and targets (N,), and the weights that make them.

    ``forward`` are the weights on the logits' grid, ``backward`` on the gradient's, which has
    ``bits`` bits for d.
    """

    def __init__(
        self,
        contexts: Integers,
        targets: Integers,
        forward: Grids,
        backward: Grids,
        bias: Floats,
        bits: int,
    ):
        self.contexts, self.targets, self.bias = contexts, targets, bias
        self.forward, self.backward = forward, backward
        self.unit, self.scale = forward.E_unit * forward.W_unit, ldexp(1.0, bits)
        self.gap, self.S = np.empty((2, len(targets)))  # which the losses follow from
        self.engine = engines.chosen()

    def add_up(self, sums: Floats) -> int:
        """Fill ``sums`` (P,) with dE, dW and db, end to end; return Σ nll in ``head.LOSS_UNIT``."""
        N, K = self.contexts.shape
        occurs = np.zeros((K, self.forward.E.shape[0]), dtype=bool)
        occurs[np.arange(K), self.contexts] = True
        if is_cheaper_by_table(N * K, int(np.count_nonzero(occurs)), self.forward.E.shape[1]):
            self._by_table(sums, occurs)
        else:
            self._by_contexts(sums)
        return total_loss(self.gap + log_partition(self.S, self.forward.E.shape[0]))

    def _views(self, sums: Floats) -> tuple[Floats, Floats, Floats]:
        """Cut sums (P,) into dE (V, D), dW (K, D, V) and db (V,)."""
        K, D, V = self.forward.W.shape
        dW = sums[V * D : -V].reshape(D, K, V).transpose(1, 0, 2)  # so it lies in memory
        return sums[: V * D].reshape(V, D), dW, sums[-V:]

    def _to_gradients(self, z: Floats, block: slice) -> Floats:
        """Turn integer logits into d in place, and note what the losses follow from."""
        rows = self.targets[block], self.scale, self.gap[block], self.S[block]
        self.engine.gradients(z, self.unit, self.bias, *rows)
        return z

    def _by_contexts(self, sums: Floats) -> None:
        """Add up dW = hᵀ·d, dh = d·Wᵀ, and dE from dh: 3·N·K·D·V multiplications."""
        K, D, V = self.forward.W.shape
        W, W_backward = (grids.W.reshape(K * D, V) for grids in (self.forward, self.backward))

        def hidden(E: Floats, x: Integers) -> Floats:
            out = scratch("hidden", len(x), K, D)
            return E.take(x, axis=0, out=out, mode="clip").reshape(-1, K * D)

        def add_up(part: slice, sums: Floats) -> None:
            dE, dW, db = self._views(sums)
            for block in blocks(part, V, 1 << 17):
                x = self.contexts[block]
                z = exact_matmul(hidden(self.forward.E, x), W, out=scratch("logits", len(x), V))
                d = self._to_gradients(z, block)
                h = hidden(self.backward.E, x)
                dW += exact_matmul(h.T, d, out=scratch("dW", K * D, V)).reshape(K, D, V)
                dh = exact_matmul(d, W_backward.T, out=scratch("dh", len(x), K * D))
                self.engine.scatter(dh.reshape(-1, D), x.reshape(-1, 1), dE)
                db += exact_sum(d, axis=0)

        sums[...] = 0.0
        accumulate(add_up, sums, len(self.targets), K * D * V // 8)

    def _by_table(self, sums: Floats, occurs: Floats) -> None:
        """Add up dT = Xᵀ·d, and position by position dW = Eᵀ·dT, dE = dT·Wᵀ: 3·R·D·V products.

        ``occurs`` (K, V) tells which tokens stand where; they are the R rows of the table.
        """
        K, D, V = self.forward.W.shape
        position, token = np.nonzero(occurs)  # (R,) each
        R = len(token)
        number = np.empty((K, V), dtype=np.int64)  # of a row of the table
        number[occurs] = np.arange(R)
        slots = number[np.arange(K), self.contexts]  # (N, K)
        bounds = np.searchsorted(position, np.arange(K + 1)).tolist()
        cuts = [slice(*pair) for pair in pairwise(bounds)]  # the rows of each position
        table, dT, terms = scratch("table", R, V), scratch("dT", R, V), scratch("terms", R, D)
        dT[...] = 0.0
        dE, dW, db = self._views(sums)

        def fill(part: slice) -> None:
            for W, rows in zip(self.forward.W[part], cuts[part], strict=True):
                exact_matmul(self.forward.E[token[rows]], W, out=table[rows])

        def add_up(part: slice, dT: Floats) -> None:
            for block in blocks(part, V, self.engine.BLOCK):
                d = self._to_gradients(self.engine.gather(table, slots[block]), block)
                self.engine.scatter(d, slots[block], dT)

        def work_back(part: slice) -> None:
            for k in range(part.start, part.stop):
                E, W = self.backward.E[token[cuts[k]]], self.backward.W[k]
                exact_matmul(E.T, dT[cuts[k]], out=dW[k])
                exact_matmul(dT[cuts[k]], W.T, out=terms[cuts[k]])

        in_parallel(fill, K, R * D * V // K // 8)
        accumulate(add_up, dT, len(slots), K * V)
        in_parallel(work_back, K, 2 * R * D * V // K // 8)
        dE[...] = 0.0
        self.engine.scatter(terms, token[:, None], dE)
        db[...] = exact_sum(dT[cuts[0]], axis=0)  # each prediction has one token at position 0
