"""The gradient of a batch is one vector of integers, so parts of a batch add up in any order.

Two ways to compute it, by contexts and by table, add the same integers: the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigen.errors import OptionError
from minigen.exact.arithmetic import Floats, Integers, exact_matmul, exact_sum
from minigen.model import engines
from minigen.model.head import LOSS_UNIT, Head, total_loss
from minigen.model.parallel import blocks, in_parallel, resources, scratch, shares

PASSES = 38  # what the table's passes over the row of a token cost, in products
PER_NANOSECOND = 32  # products that a thread computes
COLUMNS = 512  # of W that a product takes at least, since it costs some time to begin one
BLOCK = 1 << 20  # numbers of d that are held at once


def cut(flat: Floats, V: int, K: int, D: int) -> tuple[Floats, Floats, Floats]:
    """Cut what is laid out like the parameters (P,) into E (V, D), W (D, K, V) and b (V,)."""
    return flat[: V * D].reshape(V, D), flat[V * D : -V].reshape(D, K, V), flat[-V:]


class Grids(NamedTuple):
    """E (V, D) and W (D, K, V) as integers, each with the power of two that is its unit."""

    E: Floats
    E_unit: float
    W: Floats
    W_unit: float

    def hidden(self, contexts: Integers) -> Floats:
        """Return h of contexts (n, K) as W lies, so that no product copies it: (n, D·K)."""
        h: Floats = self.E.take(contexts, axis=0).transpose(0, 2, 1)  # (n, D, K)
        return h.reshape(len(h), h.shape[1] * h.shape[2])


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


class Batch(NamedTuple):
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
        g = min(K, -(-COLUMNS // V))  # positions of a group; the last one has perhaps fewer
        cells = self.contexts + V * (np.arange(K) // g)  # (N, K), a number for a token in a group
        occurs = np.zeros(-(-K // g) * V, dtype=bool)
        occurs[cells] = True
        rows = g * int(np.count_nonzero(occurs))
        with resources()[1].limit(limits=1):
            if is_cheaper_by_table(self.contexts.size, rows, D):
                self._by_table(sums, g, cells, occurs)
            else:
                self._by_contexts(sums)
        return total_loss(self.head.losses)

    def _by_contexts(self, sums: Floats) -> None:
        """Add up dW = hᵀ·d, dh = d·Wᵀ, and dE from dh: 3·N·K·D·V multiplications."""
        engine, (D, K, V) = engines.chosen(), self.forward.W.shape

        def add_up(part: slice) -> Floats:
            is_first = part.start == block.start == 0
            own = sums if is_first else scratch(f"sums from {part.start}", len(sums))
            dE, dW, db = cut(own, V, K, D)
            x = contexts[part]
            d = scratch("d", len(x), V)
            exact_matmul(self.forward.hidden(x), self.forward.W.reshape(-1, V), out=d)
            engine.gradients(d, np.arange(len(x))[:, None], head.of(part), d)
            exact_matmul(self.backward.hidden(x).T, d, out=dW.reshape(-1, V))
            dh = exact_matmul(d, self.backward.W.reshape(-1, V).T).reshape(len(x), D, K)
            dE[...] = 0.0
            engine.scatter(dh.transpose(0, 2, 1).reshape(-1, D), x.reshape(-1, 1), dE)
            db[...] = exact_sum(d, axis=0)
            return own

        cost = V + 3 * K * D * V // PER_NANOSECOND
        for block in blocks(len(self.contexts), V, BLOCK):
            contexts, head = self.contexts[block], self.head.of(block)
            for own in in_parallel(add_up, shares(len(contexts), cost)):
                if own is not sums:
                    sums += own

    def _by_table(self, sums: Floats, g: int, cells: Integers, occurs: NDArray[np.bool_]) -> None:
        """Add up dT = Xᵀ·d, and from it dW = Eᵀ·dT and dE = dT·Wᵀ: 3·R·D·g·V multiplications.

        The R ``cells`` that occur are the rows of the table: what a token adds to the logits from
        each of the g positions of a group. Threads share the groups, then the predictions, then
        the groups again: none writes beside another.
        """
        engine, (D, K, V), N = engines.chosen(), self.forward.W.shape, len(self.contexts)
        cell, number = np.flatnonzero(occurs), np.cumsum(occurs) - 1  # of a row, of a cell
        R, token = len(cell), cell % V
        slots = number[cells] * g + np.arange(K) % g  # (N, K)
        bounds = np.searchsorted(cell, range(0, len(occurs) + 1, V)).tolist()
        groups = [(slice(*bounds[i : i + 2]), slice(i * g, i * g + g)) for i in range(-(-K // g))]
        table = scratch("table", R, g * V)
        dT = table if N * V <= BLOCK else scratch("dT", R, g * V)  # once it was read for all
        terms = scratch("terms", R, D)
        dE, dW, db = cut(sums, V, K, D)

        def fill(part: slice) -> None:
            for rows, positions in groups[part]:
                E = self.forward.E.take(token[rows], axis=0)
                W = self.forward.W[:, positions].reshape(D, -1)
                exact_matmul(E, W, out=table[rows, : W.shape[1]])

        def predict(part: slice) -> None:
            engine.gradients(table.reshape(-1, V), x[part], head.of(part), d[part])

        def learn(part: slice) -> None:
            first, stop = bounds[part.start], bounds[part.stop]
            own = dT[first:stop].reshape(-1, V)
            if block.start == 0:
                own[...] = 0.0
            engine.scatter(d, slots[block, part.start * g : part.stop * g] - first * g, own)
            if block.stop == N:
                for rows, positions in groups[part]:
                    E = self.backward.E.take(token[rows], axis=0)
                    W = self.backward.W[:, positions].reshape(D, -1)
                    dT_of_group, dW_of_group = dT[rows, : W.shape[1]], dW[:, positions]
                    exact_matmul(E.T, dT_of_group, out=dW_of_group.reshape(D, -1))
                    exact_matmul(dT_of_group, W.T, out=terms[rows])

        cost = g * V * (N // 5 + 3 * D * R // len(groups) // PER_NANOSECOND)
        parts = shares(len(groups), cost)
        in_parallel(fill, parts)
        for block in blocks(N, V, BLOCK):
            x, head = slots[block], self.head.of(block)
            d = scratch("d", len(x), V)
            in_parallel(predict, shares(len(x), V + K * V // 8))
            in_parallel(learn, parts)
        dE[...] = 0.0
        engine.scatter(terms, token[:, None], dE)
        db[...] = exact_sum(dT[: bounds[1], :V], axis=0)  # where each prediction has a token
