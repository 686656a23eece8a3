"""The model: an embedding and one linear map per context position, z = Σₖ E[xₖ]·W[:, k, :] + b.

It is linear in one-hot contexts: z = X·T + b, where row (v, k) of the table T is E[v]·W[:, k, :].
One table a step replaces N products; in generation it is the cache of what was read so far.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from minigen.errors import OptionError
from minigen.exact import selfcheck
from minigen.exact.arithmetic import (
    Floats,
    exact_matmul,
    exact_sum,
    grid_bits,
    grid_unit,
    largest_magnitude,
    round_to_grid,
)
from minigen.exact.streams import Stream
from minigen.model.head import LOSS_UNIT, gradient_scale

Integers = NDArray[np.int64]

PARAMETERS = ("E", "W", "b")


def fingerprint(parameters: Mapping[str, Floats]) -> str:
    """SHA-256 over E, W, b: name, NUL, shape as decimals joined by commas, NUL, `<f8` bytes."""
    digest = hashlib.sha256()
    for name in PARAMETERS:
        tensor = np.ascontiguousarray(parameters[name], dtype="<f8")
        digest.update(f"{name}\0{','.join(map(str, tensor.shape))}\0".encode())
        digest.update(tensor.reshape(-1).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Statistics:
    """What a batch says about the table: integers, so parts of a batch add up in any order.

    rows (R,) sorted: position·V + token for each that occurs; dT (R, V) in steps of 1/G with G
    from ``step_size``, the predictions of the whole step; loss in ``head.LOSS_UNIT``; count of
    predictions seen. The bias needs no sum of its own: db is the sum of dT over any one position.
    """

    rows: Integers
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
        rows = np.union1d(self.rows, other.rows)
        dT = np.zeros((len(rows), self.dT.shape[1]))
        for part in (self, other):
            dT[np.searchsorted(rows, part.rows)] += part.dT
        loss, count = self.loss + other.loss, self.count + other.count
        return Statistics(rows, dT, loss, count, self.step_size)

    @property
    def mean_loss(self) -> float:
        """Mean negative log-likelihood in nats."""
        return self.loss / self.count * LOSS_UNIT


class Model:
    """Parameters E (V, D), W (D, K, V), b (V,) and what follows from them.

    ``parameters`` are views of one flat array, ``flat``, so that the optimizer is one loop; who
    changes them calls ``changed()``. Raises MinigenError where this process does not compute as
    the bits need it.
    """

    def __init__(self, vocab_size: int, context_length: int, embedding_dim: int):
        self.vocab_size, self.context_length = vocab_size, context_length
        self.embedding_dim = embedding_dim
        V, K, D = vocab_size, context_length, embedding_dim
        self.shapes = {"E": (V, D), "W": (D, K, V), "b": (V,)}
        self.flat = np.zeros(sum(prod(shape) for shape in self.shapes.values()))
        self.parameters = self.views(self.flat)
        selfcheck.check(K * D, V)
        self.bits = grid_bits(max(K * D, V))
        self._offsets = np.arange(K)  # of the rows of a token, one a position
        self.changed()

    def __repr__(self) -> str:
        listed = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        return f"Model({self.flat.size:,} weights: {listed})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights: what two runs compare."""
        return fingerprint(self.parameters)

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
        self._first_rows = np.full(self.vocab_size, -1)  # of each token, in the rows below
        self._rows = np.empty((0, self.vocab_size))  # of the table: K for each token met so far
        self._filled = 0

    def grids(self) -> tuple[Floats, float, Floats, float]:
        """E and W rounded once to integers: (E (V, D), its unit, W (D, K, V), its unit).

        Raises MinigenError where a parameter is not finite or too large for the grid.
        """
        if self._grids is None:
            grid_unit(largest_magnitude(self.parameters["b"]), self.bits)
            E, E_unit = round_to_grid(self.parameters["E"], self.bits)
            W, W_unit = round_to_grid(self.parameters["W"], self.bits)
            self._grids = E, E_unit, W, W_unit
        return self._grids

    def table(self, tokens: Integers) -> tuple[Floats, float]:
        """Rows of T for the given tokens (U,): integers (U, K, V) and their unit."""
        E, E_unit, W, W_unit = self.grids()
        rows = exact_matmul(E[tokens], W.reshape(self.embedding_dim, -1))  # (U, K·V)
        return rows.reshape(-1, self.context_length, self.vocab_size), E_unit * W_unit

    def hidden(self, contexts: Integers) -> Floats:
        """Hidden representation: the grid's K embeddings side by side. (N, K) → (N, K·D)."""
        E, E_unit, _, _ = self.grids()
        return (E[contexts] * E_unit).reshape(len(contexts), -1)

    def logits(self, contexts: Integers) -> Floats:
        """Logits of contexts (N, K) → (N, V), from the table rows of the tokens met so far.

        The same bits as ``head.project(self.hidden(contexts), W, b)``, alone or in any batch.
        """
        first_rows = self._first_rows[contexts]  # (N, K)
        if first_rows.min(initial=0) < 0:
            self._remember(np.unique(contexts[first_rows < 0]))
            first_rows = self._first_rows[contexts]
        _, E_unit, _, W_unit = self.grids()
        rows = self._rows.take((first_rows + self._offsets).T, axis=0)  # (K, N, V)
        z: Floats = exact_sum(rows, axis=0) * (E_unit * W_unit) + self.parameters["b"]  # (N, V)
        return z

    def _remember(self, tokens: Integers) -> None:
        table, _ = self.table(tokens)  # (U, K, V)
        K, V = self.context_length, self.vocab_size
        start, self._filled = self._filled, self._filled + len(tokens) * K
        if self._filled > len(self._rows):
            rows = np.empty((min(K * V, max(2 * len(self._rows), self._filled)), V))
            rows[:start] = self._rows[:start]
            self._rows = rows
        self._rows[start : self._filled] = table.reshape(-1, V)
        self._first_rows[tokens] = np.arange(start, self._filled, K)

    def statistics(self, contexts: Integers, targets: Integers, step_size: int) -> Statistics:
        """Gradient sums and loss of predictions: contexts (N, K), targets (N,).

        ``step_size`` is the number of predictions of the whole step, of which these may be a part.
        """
        from minigen.model.kernels import (  # imports scipy, which generation does without
            engine,
            multiply,
        )

        V, K, b = self.vocab_size, self.context_length, self.parameters["b"]
        for tokens in (contexts, targets):
            if not 0 <= tokens.min(initial=0) <= tokens.max(initial=0) < V:
                raise OptionError(
                    f"tokens must lie in 0 … {V - 1} (got {tokens.min()} … {tokens.max()})"
                )
        columns = contexts + V * np.arange(K)  # (N, K), of X
        occurs = np.zeros(K * V, dtype=bool)
        occurs[columns] = True
        rows = np.flatnonzero(occurs)
        slots = (np.add.accumulate(occurs, dtype=np.int64) - 1)[columns]  # (N, K), into rows

        E, E_unit, W, W_unit = self.grids()
        table = np.empty((len(rows), V))

        def products(k: int, part: slice, tokens: Integers) -> None:
            exact_matmul(E[tokens], W[:, k], out=table[part])

        multiply(products, self._positions(rows), E.shape[1] * table.size)
        scale = gradient_scale(step_size)
        dT, loss = engine().statistics(table, E_unit * W_unit, b, slots, targets, scale)
        return Statistics(rows, dT, loss, len(targets), step_size)

    def _positions(self, rows: Integers) -> list[tuple[int, slice, Integers]]:
        """Cut sorted rows by position: (k, where those of position k stand, their tokens)."""
        V, K = self.vocab_size, self.context_length
        bounds = np.searchsorted(rows, V * np.arange(K + 1)).tolist()
        parts = [slice(*pair) for pair in pairwise(bounds)]
        return [(k, part, rows[part] - V * k) for k, part in enumerate(parts)]

    def gradient(self, statistics: Statistics) -> Floats:
        """Gradient of the step's mean loss, flat like ``flat``; ``views`` names its parts.

        dW = Eᵀ·dT and dE = dT·Wᵀ at each position, the latter added in order of k; db = Σ dT over
        one position. dT is rounded once to its grid.
        """
        from minigen.model.kernels import in_parallel, multiply

        E, E_unit, W, W_unit = self.grids()
        dT, positions = statistics.dT, self._positions(statistics.rows)
        per_prediction = 1.0 / gradient_scale(statistics.step_size) / statistics.step_size
        largest = max(in_parallel(lambda part: largest_magnitude(dT[part]), *dT.shape))
        unit = grid_unit(largest, self.bits)
        gradient = np.empty_like(self.flat)
        dE, dW, db = self.views(gradient).values()
        terms = np.empty((len(dT), self.embedding_dim))  # of dE

        def products(k: int, part: slice, tokens: Integers) -> None:
            integers, _ = round_to_grid(dT[part], self.bits, unit=unit)
            exact_matmul(E[tokens].T, integers, out=dW[:, k])
            exact_matmul(integers, W[:, k].T, out=terms[part])

        multiply(products, positions, 2 * self.embedding_dim * dT.size)
        dW *= E_unit * unit * per_prediction
        dE[...] = 0.0
        for _, part, tokens in positions:
            dE[tokens] += terms[part]
        dE *= W_unit * unit * per_prediction
        _, first, _ = positions[0]
        db[...] = exact_sum(dT[first], axis=0) * per_prediction
        return gradient
