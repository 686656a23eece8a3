"""The gradient of a batch is one vector of integers, so parts of a batch add up in any order.

Two ways to compute it, by contexts and by table, add the same integers: the same bits.
"""

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from minigen.errors import OptionError
from minigen.exact.arithmetic import Floats, Integers, exact_matmul, exact_sum
from minigen.model import engines
from minigen.model.head import LOSS_UNIT, Head, total_loss
from minigen.model.parallel import blocks, in_parallel, scratch

PASSES = 10  # what the table's passes over the row of a token cost, in products
HAND_OVERS = 30_000_000  # and what its smaller products and more hand-overs cost, in all
BLOCK = 1 << 17  # numbers of d that a thread works on at once
CHUNK = 1 << 19  # and that all threads do


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


def is_cheaper_by_table(tokens: int, rows: int, shape: tuple[int, int]) -> bool:
    """Whether a table of so many rows is worth it for N·K tokens in contexts; shape is (V, D).

    Each row fewer saves three times D·V products.
    """
    V, D = shape
    return V * (3 * D * (tokens - rows) - PASSES * tokens) > HAND_OVERS


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
        """Fill ``sums`` (P,) with dE, dW and db, end to end; return Σ nll in ``head.LOSS_UNIT``."""
        K, _, V = self.forward.W.shape
        occurs = np.zeros((K, V), dtype=bool)
        occurs[np.arange(K), self.contexts] = True
        rows = int(np.count_nonzero(occurs))
        if is_cheaper_by_table(self.contexts.size, rows, self.forward.E.shape):
            self._by_table(sums, occurs)
        else:
            self._by_contexts(sums)
        return total_loss(self.head.losses)

    def _views(self, sums: Floats) -> tuple[Floats, Floats, Floats]:
        """Cut sums (P,) into dE (V, D), dW (D, K, V) and db (V,)."""
        K, D, V = self.forward.W.shape
        return sums[: V * D].reshape(V, D), sums[V * D : -V].reshape(D, K, V), sums[-V:]

    def _by_contexts(self, sums: Floats) -> None:
        """Add up dW = hᵀ·d, dh = d·Wᵀ, and dE from dh: 3·N·K·D·V multiplications."""
        engine, (K, D, V) = engines.chosen(), self.forward.W.shape
        # Rows of W, and columns of h, in the order in which they lie in memory: (D, K).
        W, W_backward = (
            grids.W.transpose(1, 0, 2).reshape(D * K, V) for grids in (self.forward, self.backward)
        )

        def hidden(E: Floats, x: Integers) -> Floats:
            return E.take(x, axis=0).transpose(0, 2, 1).reshape(len(x), D * K)

        def add_up(part: slice) -> Floats:
            own = sums if part.start == 0 else scratch(f"sums from {part.start}", len(sums))
            own[...] = 0.0
            dE, dW, db = self._views(own)
            dW = dW.reshape(D * K, V)
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
                engine.scatter(dh.reshape(-1, D), x.reshape(-1, 1), dE, 0)
            return own

        _, *others = in_parallel(add_up, len(self.contexts), K * D * V // 8)
        for other in others:
            sums += other

    def _by_table(self, sums: Floats, occurs: Floats) -> None:
        """Add up dT = Xᵀ·d, and position by position dW = Eᵀ·dT, dE = dT·Wᵀ: 3·R·D·V products.

        ``occurs`` (K, V) tells which tokens stand where; they are the R rows of the table. Threads
        share its rows first, then predictions, then columns: none writes beside another.
        """
        engine, (K, D, V), N = engines.chosen(), self.forward.W.shape, len(self.contexts)
        position, token = np.nonzero(occurs)  # (R,) each
        R = len(token)
        number = np.empty((K, V), dtype=np.int64)  # of a row of the table
        number[occurs] = np.arange(R)
        slots = number[np.arange(K), self.contexts]  # (N, K)
        bounds = np.searchsorted(position, np.arange(K + 1)).tolist()
        cuts = [slice(*pair) for pair in pairwise(bounds)]  # the rows of each position
        E, E_backward = (grids.E.take(token, axis=0) for grids in (self.forward, self.backward))
        table, dT = scratch("table", R, V), scratch("dT", R * V)
        dE, dW, db = self._views(sums)

        def fill(part: slice) -> None:
            for W, rows in zip(self.forward.W, cuts, strict=True):
                own = slice(max(rows.start, part.start), min(rows.stop, part.stop))  # perhaps none
                exact_matmul(E[own], W, out=table[own])

        def predict(part: slice) -> None:
            rows = slice(block.start + part.start, block.start + part.stop)
            engine.gradients(table, slots[rows], self.head.of(rows), d[part])

        def learn(columns: slice) -> Floats:
            own = dT[R * columns.start : R * columns.stop].reshape(R, -1)
            terms = scratch(f"terms from {columns.start}", R, D)
            if block.start == 0:
                own[...] = 0.0
            engine.scatter(d, slots[block], own, columns.start)
            if block.stop == N:
                for W, dW_of_k, rows in zip(
                    self.backward.W, dW.transpose(1, 0, 2), cuts, strict=True
                ):
                    exact_matmul(E_backward[rows].T, own[rows], out=dW_of_k[:, columns])
                    exact_matmul(own[rows], W[:, columns].T, out=terms[rows])
                db[columns] = exact_sum(own[cuts[0]], axis=0)  # where each prediction has a token
            return terms

        in_parallel(fill, R, D * V // 8)
        for block in blocks(slice(0, N), V, CHUNK):
            d = scratch("d", block.stop - block.start, V)
            in_parallel(predict, len(d), K * V)
            terms = in_parallel(learn, V, K * N)
        dE[...] = 0.0
        engine.scatter(reduce(np.add, terms), token[:, None], dE, 0)
