"""The gradient of a batch is one vector of integers, so parts of a batch add up in any order.

Two ways to compute it, by contexts and by table, add the same integers: the same bits.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from minigen.errors import OptionError
from minigen.exact.arithmetic import Floats, Integers, exact_matmul, exact_sum
from minigen.model import engines
from minigen.model.head import LOSS_UNIT, Head, total_loss
from minigen.model.parallel import blocks, in_parallel, resources, scratch, shares

PASSES = 38  # what the table's passes over the row of a token cost, in products
PER_NANOSECOND = 32  # products that a thread computes
COLUMNS = 600  # of W that a product takes at least, since it costs some time to begin one
BLOCK = 1 << 19  # numbers of d that are held at once


class Grids(NamedTuple):
    """E (V, D) and W (D, K, V) as integers, each with the power of two that is its unit."""

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

    Each row fewer saves three times D products for each of the V columns.
    """
    return 3 * embedding_dim * (tokens - rows) > PASSES * tokens


@dataclass(frozen=True)
class Batch:
    """Contexts (N, K), the head that predicts behind them, and the weights that both take.

    ``forward`` are the weights on the logits' grid, ``backward`` on the gradient's.
    """

    contexts: Integers
    head: Head
    forward: Grids
    backward: Grids

    def add_up(self, sums: Floats) -> int:
        """Fill ``sums`` (P,) with dE, dW and db, end to end; return Σ nll in ``head.LOSS_UNIT``.

        BLAS is held at one thread: its own would fight over the cores with ours, and on a busy
        machine wait for each other.
        """
        D, K, V = self.forward.W.shape
        groups = list(blocks(slice(0, K), V, COLUMNS))  # of g positions, the last perhaps of fewer
        g = groups[0].stop
        occurs = np.zeros((len(groups), V), dtype=bool)
        occurs[np.arange(K) // g, self.contexts] = True
        rows = g * int(np.count_nonzero(occurs))
        _, blas = resources()
        with blas.limit(limits=1):
            if is_cheaper_by_table(self.contexts.size, rows, D):
                self._by_table(sums, groups, occurs)
            else:
                self._by_contexts(sums)
        return total_loss(self.head.losses)

    def _views(self, sums: Floats) -> tuple[Floats, Floats, Floats]:
        """Cut sums (P,) into dE (V, D), dW (D, K, V) and db (V,)."""
        D, K, V = self.forward.W.shape
        return sums[: V * D].reshape(V, D), sums[V * D : -V].reshape(D, K, V), sums[-V:]

    def _by_contexts(self, sums: Floats) -> None:
        """Add up dW = hᵀ·d, dh = d·Wᵀ, and dE from dh: 3·N·K·D·V multiplications."""
        engine, (D, K, V) = engines.chosen(), self.forward.W.shape
        # Rows of W, and columns of h, in the order in which they lie in memory: (D, K).
        W, W_backward = (grids.W.reshape(D * K, V) for grids in (self.forward, self.backward))

        def hidden(E: Floats, x: Integers) -> Floats:
            return E.take(x, axis=0).transpose(0, 2, 1).reshape(len(x), D * K)

        def add_up(part: slice) -> Floats:
            own = sums if part.start == 0 else scratch(f"sums from {part.start}", len(sums))
            dE, dW, db = self._views(own)
            dE[...], dW = 0.0, dW.reshape(D * K, V)
            for rows in blocks(part, V, BLOCK):
                x = self.contexts[rows]
                d = exact_matmul(hidden(self.forward.E, x), W, out=scratch("d", len(x), V))
                engine.gradients(d, np.arange(len(x))[:, None], self.head.of(rows), d)
                h = hidden(self.backward.E, x)
                if rows.start == part.start:
                    exact_matmul(h.T, d, out=dW)
                    db[...] = exact_sum(d, axis=0)
                else:
                    dW += exact_matmul(h.T, d, out=scratch("dW", D * K, V))
                    db += exact_sum(d, axis=0)
                dh = exact_matmul(d, W_backward.T).reshape(len(x), D, K).transpose(0, 2, 1)
                engine.scatter(dh.reshape(-1, D), x.reshape(-1, 1), dE)
            return own

        cost = V + 3 * K * D * V // PER_NANOSECOND
        _, *others = in_parallel(add_up, shares(len(self.contexts), cost))
        for other in others:
            sums += other

    def _by_table(self, sums: Floats, groups: list[slice], occurs: Floats) -> None:
        """Add up dT = Xᵀ·d, and from it dW = Eᵀ·dT and dE = dT·Wᵀ: 3·R·D·g·V multiplications.

        ``occurs`` (G, V) tells which tokens stand in which group of g positions; they are the R
        rows of the table, and what each adds to the logits from those positions is in it. Threads
        share the groups, then the predictions, then the groups again: none writes beside another.
        """
        engine, (D, K, V), N = engines.chosen(), self.forward.W.shape, len(self.contexts)
        group, token = np.nonzero(occurs)  # (R,) each
        R, g = len(token), groups[0].stop
        number = np.empty(occurs.shape, dtype=np.int64)  # of a row of the table
        number[occurs] = np.arange(R)
        slots = number[np.arange(K) // g, self.contexts] * g + np.arange(K) % g  # (N, K)
        bounds = np.searchsorted(group, np.arange(len(groups) + 1)).tolist()
        cuts = [slice(*pair) for pair in pairwise(bounds)]  # the rows of each group
        E, E_backward = (grids.E.take(token, axis=0) for grids in (self.forward, self.backward))
        table, dT = scratch("table", R, g * V), scratch("dT", R, g * V)
        terms = scratch("terms", R, D)
        dE, dW, db = self._views(sums)

        def fill(part: slice) -> None:
            for rows, positions in zip(cuts[part], groups[part], strict=True):
                W = self.forward.W[:, positions].reshape(D, -1)
                exact_matmul(E[rows], W, out=table[rows, : W.shape[1]])

        def predict(part: slice) -> None:
            rows = slice(block.start + part.start, block.start + part.stop)
            engine.gradients(table.reshape(-1, V), slots[rows], self.head.of(rows), d[part])

        def learn(part: slice) -> None:
            first, stop = bounds[part.start], bounds[part.stop]
            own = dT[first:stop].reshape(-1, V)
            if block.start == 0:
                own[...] = 0.0
            its = slots[block, groups[part][0].start : groups[part][-1].stop]
            engine.scatter(d, its - first * g, own)
            if block.stop == N:
                for rows, positions in zip(cuts[part], groups[part], strict=True):
                    W, dW_of_group = (x[:, positions].reshape(D, -1) for x in (self.backward.W, dW))
                    dT_of_group = dT[rows, : W.shape[1]]
                    exact_matmul(E_backward[rows].T, dT_of_group, out=dW_of_group)
                    exact_matmul(dT_of_group, W.T, out=terms[rows])

        cost = g * V * (N // 5 + 3 * D * R // len(groups) // PER_NANOSECOND)
        parts = shares(len(groups), cost)
        in_parallel(fill, parts)
        for block in blocks(slice(0, N), V, BLOCK):
            d = scratch("d", block.stop - block.start, V)
            in_parallel(predict, shares(len(d), V + K * V // 8))
            in_parallel(learn, parts)
        dE[...] = 0.0
        engine.scatter(terms, token[:, None], dE)
        db[...] = exact_sum(dT[cuts[0], :V], axis=0)  # each prediction has a token in the first
