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
from minigen.model.head import LOSS_UNIT, total_loss
from minigen.model.parallel import blocks, in_parallel, scratch

PASSES = 6  # what the table's two passes over a row cost, in products of three matrices


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
        self.losses = np.empty(len(targets))  # in nats
        self.engine = engines.chosen()

    def gradient(self) -> tuple[Floats, int]:
        """Return the sums (P,), dE, dW and db end to end, and Σ nll in ``head.LOSS_UNIT``."""
        N, K = self.contexts.shape
        V, D = self.forward.E.shape
        occurs = np.zeros((K, V), dtype=bool)
        occurs[np.arange(K), self.contexts] = True
        rows = int(np.count_nonzero(occurs))
        # A row fewer saves D products three times over, and costs each context two passes.
        is_dear = D * (N * K - rows) < PASSES * N * K
        sums = self.by_contexts() if is_dear else self.by_table(occurs)
        return sums, total_loss(self.losses)

    def _views(self, sums: Floats) -> tuple[Floats, Floats]:
        """Cut sums (P,) into dE (V, D) and dW with db as its last row (D·K + 1, V)."""
        V, D = self.forward.E.shape
        return sums[: V * D].reshape(V, D), sums[V * D :].reshape(-1, V)

    def _logit_gradients(self, z: Floats, block: slice) -> Floats:
        """Turn integer logits into d in place, and note the losses."""
        self.engine.gradients(
            z, self.unit, self.bias, self.targets[block], self.scale, self.losses[block]
        )
        return z

    def by_contexts(self) -> Floats:
        """DW = hᵀ·d, dh = d·Wᵀ, dE gathers dh: 3·N·K·D·V multiplications."""
        N, K = self.contexts.shape
        V, D = self.forward.E.shape
        # Standing side by side in h are D·K numbers in W's order, and 1, whose weight is b.
        W, W_backward = self.forward.W.reshape(-1, V), self.backward.W.reshape(-1, V)  # (D·K, V)

        def hidden(E: Floats, x: Integers) -> Floats:
            h = scratch("hidden", len(x), D * K + 1)
            h[:, :-1].reshape(-1, D, K)[...] = E[x].transpose(0, 2, 1)
            h[:, -1] = 1.0
            return h

        def add_up(part: slice) -> Floats:
            sums = np.zeros(V * (D + D * K + 1))
            dE, dW = self._views(sums)
            for block in blocks(part, V, 1 << 17):
                x = self.contexts[block]
                z = scratch("logits", len(x), V)
                d = self._logit_gradients(
                    exact_matmul(hidden(self.forward.E, x)[:, :-1], W, out=z), block
                )
                h = hidden(self.backward.E, x)
                dW += exact_matmul(h.T, d, out=scratch("products", D * K + 1, V))
                dh = exact_matmul(d, W_backward.T, out=scratch("dh", len(x), D * K))
                dh = dh.reshape(-1, D, K).transpose(0, 2, 1).reshape(-1, D)  # (n·K, D)
                self.engine.scatter(dh, x.reshape(-1, 1), dE)
            return sums

        return _added(in_parallel(add_up, N, K * D * V))

    def by_table(self, occurs: Floats) -> Floats:
        """DT = Xᵀ·d, dW = Eᵀ·dT and dE = dT·Wᵀ, position by position: 3·R·D·V multiplications.

        ``occurs`` (K, V) tells which tokens stand where; they are the R rows of the table.
        """
        N, K = self.contexts.shape
        V, D = self.forward.E.shape
        position, token = np.nonzero(occurs)  # (R,) each
        R = len(token)
        number = np.empty((K, V), dtype=np.int64)  # of a row of the table
        number[occurs] = np.arange(R)
        slots = number[np.arange(K), self.contexts]  # (N, K)
        bounds = np.searchsorted(position, np.arange(K + 1)).tolist()
        cuts = [(k, slice(*pair)) for k, pair in enumerate(pairwise(bounds))]
        table, terms = scratch("table", R, V), scratch("terms", R, D)
        sums = np.zeros(V * (D + D * K + 1))
        dE, dW = self._views(sums)

        def fill(part: slice) -> None:
            for k, rows in cuts[part]:
                exact_matmul(self.forward.E[token[rows]], self.forward.W[:, k], out=table[rows])

        def add_up(part: slice) -> Floats:
            dT = scratch("dT", R, V)
            dT[...] = 0.0
            for block in blocks(part, V, self.engine.BLOCK):
                z = self.engine.gather(table, slots[block])
                self.engine.scatter(self._logit_gradients(z, block), slots[block], dT)
            return dT

        def work_back(part: slice) -> None:
            for k, rows in cuts[part]:
                E = self.backward.E[token[rows]]
                exact_matmul(E.T, dT[rows], out=dW[:-1].reshape(D, K, V)[:, k])
                exact_matmul(dT[rows], self.backward.W[:, k].T, out=terms[rows])

        in_parallel(fill, K, R * D * V // K // 16)
        dT = _added(in_parallel(add_up, N, K * V))
        in_parallel(work_back, K, 2 * R * D * V // K // 16)
        self.engine.scatter(terms, token[:, None], dE)
        dW[-1] = exact_sum(dT[cuts[0][1]], axis=0)  # each prediction has one token at position 0
        return sums


def _added(parts: list[Floats]) -> Floats:
    """Add up what the threads found, in the array of the first."""
    for part in parts[1:]:
        parts[0] += part
    return parts[0]
