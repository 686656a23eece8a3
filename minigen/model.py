"""The model: an embedding and one linear map per context position, z = Σₖ E[xₖ]·W[:, k, :] + b.

It is linear in one-hot contexts: z = X·T + b, where row (v, k) of the table T is E[v]·W[:, k, :].
One table a step replaces N products; in generation it is the cache of what was read so far.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigen.arithmetic import (
    Floats,
    exact_matmul,
    exact_sum,
    grid_bits,
    grid_unit,
    largest_magnitude,
    round_to_grid,
)
from minigen.errors import OptionError
from minigen.head import LOSS_UNIT, gradient_scale
from minigen.streams import Stream

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Statistics:
    """What a batch says about the table: integers, so parts of a batch add up in any order.

    tokens (U,) sorted, the context tokens that occur; dT (U, K, V) in steps of 1/G with G from
    ``step_size``, the predictions of the whole step; loss in ``head.LOSS_UNIT``; count of
    predictions seen. The bias needs no sum of its own: db is the sum of dT over any one position.
    """

    tokens: Integers
    dT: Floats
    loss: int
    count: int
    step_size: int

    def __add__(self, other: "Statistics") -> "Statistics":
        if self.step_size != other.step_size:
            raise OptionError(
                "statistics of one step add up, so step_size must be the same "
                f"(got {self.step_size} and {other.step_size})"
            )
        tokens = np.union1d(self.tokens, other.tokens)
        dT = np.zeros((len(tokens), *self.dT.shape[1:]))
        for part in (self, other):
            dT[np.searchsorted(tokens, part.tokens)] += part.dT
        loss, count = self.loss + other.loss, self.count + other.count
        return Statistics(tokens, dT, loss, count, self.step_size)

    @property
    def mean_loss(self) -> float:
        """Mean negative log-likelihood in nats."""
        return self.loss / self.count * LOSS_UNIT


class Model:
    """Parameters E (V, D), W (D, K, V), b (V,) and what follows from them.

    ``parameters`` are views of one flat array, ``flat``, so that the optimizer is one loop; who
    changes them calls ``changed()``.
    """

    def __init__(self, vocab_size: int, context_length: int, embedding_dim: int):
        self.vocab_size, self.context_length = vocab_size, context_length
        self.embedding_dim = embedding_dim
        V, K, D = vocab_size, context_length, embedding_dim
        self.shapes = {"E": (V, D), "W": (D, K, V), "b": (V,)}
        self.flat = np.zeros(sum(prod(shape) for shape in self.shapes.values()))
        self.parameters = self.views(self.flat)
        self.bits = grid_bits(max(K * D, V))
        self.changed()

    def views(self, flat: Floats) -> dict[str, Floats]:
        """Cut a flat array into named views of the parameters' shapes."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            views[name] = flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return views

    def initialize(self, stream: Stream) -> None:
        """Draw E uniform in ±1 and W uniform in ±1/√(K·D), in this order; b is zero."""
        E, W = self.parameters["E"], self.parameters["W"]
        fan_in = self.context_length * self.embedding_dim
        for parameter, bound in ((E, 1.0), (W, 1.0 / np.sqrt(fan_in))):
            uniforms = stream.uniforms(parameter.size).reshape(parameter.shape)
            parameter[...] = (2.0 * uniforms - 1.0) * bound
        self.changed()

    def load(self, parameters: dict[str, Floats]) -> None:
        """Copy E, W and b in."""
        for name, parameter in self.parameters.items():
            parameter[...] = parameters[name]
        self.changed()

    def changed(self) -> None:
        """Forget what was derived from the parameters: their grids and the table."""
        self._grids: tuple[Floats, float, Floats, float] | None = None
        self._slots = np.full(self.vocab_size, -1)
        self._table = np.empty((0, self.context_length, self.vocab_size))
        self._filled = 0

    def grids(self, round_to_grid: Any = round_to_grid) -> tuple[Floats, float, Floats, float]:
        """E and W rounded once to integers: (E (V, D), its unit, W (D, K·V), its unit).

        Raises MinigenError where a parameter is not finite or too large for the grid.
        """
        if self._grids is None:
            grid_unit(largest_magnitude(self.parameters["b"]), self.bits)
            E, E_unit = round_to_grid(self.parameters["E"], self.bits)
            W, W_unit = round_to_grid(self.parameters["W"], self.bits)
            self._grids = E, E_unit, W.reshape(self.embedding_dim, -1), W_unit
        return self._grids

    def table(self, tokens: Integers) -> tuple[Floats, float]:
        """Rows of T for the given tokens (U,): integers (U, K, V) and their unit."""
        E, E_unit, W, W_unit = self.grids()
        rows = exact_matmul(E[tokens], W)  # (U, K·V)
        return rows.reshape(-1, self.context_length, self.vocab_size), E_unit * W_unit

    def hidden(self, contexts: Integers) -> Floats:
        """Hidden representation: the grid's K embeddings side by side. (N, K) → (N, K·D)."""
        E, E_unit, _, _ = self.grids()
        return (E[contexts] * E_unit).reshape(len(contexts), -1)

    def logits(self, contexts: Integers) -> Floats:
        """Logits of contexts (N, K) → (N, V), from the table rows of the tokens met so far.

        The same bits as ``head.project(self.hidden(contexts), W, b)``, alone or in any batch.
        """
        slots = self._slots[contexts]  # (N, K)
        if slots.min(initial=0) < 0:
            self._remember(np.unique(contexts[slots < 0]))
            slots = self._slots[contexts]
        _, E_unit, _, W_unit = self.grids()
        rows = self._table[slots, np.arange(self.context_length)]  # (N, K, V)
        z: Floats = exact_sum(rows, axis=1) * (E_unit * W_unit) + self.parameters["b"]  # (N, V)
        return z

    def _remember(self, tokens: Integers) -> None:
        rows, _ = self.table(tokens)
        filled = self._filled + len(tokens)
        if filled > len(self._table):
            capacity = min(self.vocab_size, max(2 * len(self._table), filled))
            table = np.empty((capacity, *self._table.shape[1:]))
            table[: self._filled] = self._table[: self._filled]
            self._table = table
        self._table[self._filled : filled] = rows
        self._slots[tokens] = np.arange(self._filled, filled)
        self._filled = filled

    def statistics(self, contexts: Integers, targets: Integers, step_size: int) -> Statistics:
        """Gradient sums and loss of predictions: contexts (N, K), targets (N,).

        ``step_size`` is the number of predictions of the whole step, of which these may be a part.
        """
        from minigen.kernels import engine, matmul  # imports scipy, which generation does without

        V, K, b = self.vocab_size, self.context_length, self.parameters["b"]
        if not 0 <= targets.min(initial=0) <= targets.max(initial=0) < V:
            raise OptionError(f"targets must be tokens below {V} (got {targets.max()})")
        occurs = np.zeros(V, dtype=bool)
        occurs[contexts] = True
        tokens = np.flatnonzero(occurs)
        slots = (np.add.accumulate(occurs, dtype=np.int64) - 1)[contexts]  # (N, K)
        E, E_unit, W, W_unit = self.grids(engine().round_to_grid)
        table = matmul(E[tokens], W).reshape(-1, K, V)
        scale = gradient_scale(step_size)
        dT, loss = engine().statistics(table, E_unit * W_unit, b, slots, targets, scale)
        return Statistics(tokens, dT, loss, len(targets), step_size)

    def gradient(self, statistics: Statistics) -> Floats:
        """Gradient of the step's mean loss, flat like ``flat``; ``views`` names its parts.

        dW = Eᵀ·dT, dE = Σₖ dTₖ·Wₖᵀ, db = Σ dT over one position; dT is rounded once to its grid.
        """
        from minigen.kernels import engine, in_parallel, matmul

        E, E_unit, W, W_unit = self.grids(engine().round_to_grid)
        tokens, dT = statistics.tokens, statistics.dT
        D, K, V = self.parameters["W"].shape
        per_prediction = 1.0 / gradient_scale(statistics.step_size) / statistics.step_size
        gradient = np.empty_like(self.flat)
        views = self.views(gradient)
        views["b"][...] = exact_sum(dT[:, K - 1], axis=0) * per_prediction
        dT, dT_unit = engine().round_to_grid(dT, self.bits)
        dW = matmul(E[tokens].T, dT.reshape(-1, K * V), views["W"].reshape(D, K * V))
        dW *= E_unit * dT_unit * per_prediction
        dE = np.zeros((len(tokens), D))

        def rows(part: slice) -> None:
            for k in range(K):
                dE[part] += exact_matmul(dT[part, k], W.reshape(D, K, V)[:, k].T)

        in_parallel(rows, len(tokens), K * V * D // 16)
        views["E"][...] = 0.0
        views["E"][tokens] = dE * (W_unit * dT_unit * per_prediction)
        return gradient
