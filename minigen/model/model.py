"""The model: an embedding and one linear map per context position, z = Σₖ E[xₖ]·W[:, k, :] + b.

It is linear in one-hot contexts: z = X·T + b, where row (v, k) of the table T is E[v]·W[:, k, :].
One table a step replaces N products; in generation it is the cache of what was read so far.
"""

import hashlib
from collections.abc import Mapping
from math import ldexp, prod

import numpy as np

from minigen.errors import OptionError
from minigen.exact import selfcheck
from minigen.exact.arithmetic import (
    Floats,
    Integers,
    exact_matmul,
    exact_sum,
    grid_bits,
    grid_unit,
    largest_magnitude,
    round_to_grid,
)
from minigen.exact.streams import Stream
from minigen.model.gradient import Batch, Grids, Statistics
from minigen.model.head import gradient_bits
from minigen.model.parallel import scratch

PARAMETERS = ("E", "W", "b")


def fingerprint(parameters: Mapping[str, Floats]) -> str:
    """SHA-256 over E, W, b: name, NUL, shape as decimals joined by commas, NUL, `<f8` bytes."""
    digest = hashlib.sha256()
    for name in PARAMETERS:
        tensor = np.ascontiguousarray(parameters[name], dtype="<f8")
        digest.update(f"{name}\0{','.join(map(str, tensor.shape))}\0".encode())
        digest.update(tensor.reshape(-1).data)
    return digest.hexdigest()


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
        self._largest: list[float] | None = None  # magnitude in E, W and b
        self._grids: Grids | None = None
        self._first_rows = np.full(self.vocab_size, -1)  # of each token, in the rows below
        self._rows = np.empty((0, self.vocab_size))  # of the table: K for each token met so far
        self._filled = 0

    def units(self, bits: int) -> tuple[float, float]:
        """Units of grids of so many bits, one for all of E and one for all of W."""
        if self._largest is None:
            self._largest = [largest_magnitude(x) for x in self.parameters.values()]
        E, W, _ = [grid_unit(largest, bits) for largest in self._largest]
        return E, W

    def check(self) -> None:
        """Raise MinigenError where a parameter is not finite or too large for any grid."""
        self.units(self.bits)

    def rounded(self, bits: int, out: Floats | None = None) -> Grids:
        """E and W rounded once to integers of so many bits; ``out`` holds both, end to end."""
        V, K, D = self.vocab_size, self.context_length, self.embedding_dim
        E_unit, W_unit = self.units(bits)
        out = np.empty(self.flat.size - V) if out is None else out
        E, W = out[: V * D].reshape(V, D), out[V * D :].reshape(K, D, V)
        round_to_grid(self.parameters["E"], bits, unit=E_unit, out=E)
        round_to_grid(self.parameters["W"].transpose(1, 0, 2), bits, unit=W_unit, out=W)
        return Grids(E, E_unit, W, W_unit)

    def grids(self) -> Grids:
        """E and W on the grid of the logits, kept until the parameters change."""
        if self._grids is None:
            self._grids = self.rounded(self.bits)
        return self._grids

    def table(self, tokens: Integers) -> tuple[Floats, float]:
        """Rows of T for the given tokens (U,): integers (U, K, V) and their unit."""
        E, E_unit, W, W_unit = self.grids()
        return exact_matmul(E[tokens], W).transpose(1, 0, 2), E_unit * W_unit  # (U, K, V)

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

    def statistics(
        self, contexts: Integers, targets: Integers, step_size: int, out: Floats | None = None
    ) -> Statistics:
        """Gradient sums and loss of predictions: contexts (N, K), targets (N,).

        ``step_size`` is the number of predictions of the whole step, of which these may be a part.
        The sums are written to ``out`` (P,), if it is given.
        """
        contexts, targets = (np.ascontiguousarray(x, np.int64) for x in (contexts, targets))
        for tokens in (contexts, targets):
            if not 0 <= tokens.min(initial=0) <= tokens.max(initial=0) < self.vocab_size:
                raise OptionError(
                    f"tokens must lie in 0 … {self.vocab_size - 1} "
                    f"(got {tokens.min()} … {tokens.max()})"
                )
        bits, weight_bits = gradient_bits(step_size, self.context_length)
        size = self.flat.size - self.vocab_size
        forward = self.rounded(self.bits, scratch("forward", size))
        backward = self.rounded(weight_bits, scratch("backward", size))
        vector = np.empty_like(self.flat) if out is None else out
        batch = Batch(contexts, targets, forward, backward, self.parameters["b"], bits)
        return Statistics(vector, batch.add_up(vector), len(targets), step_size)

    def gradient(self, statistics: Statistics, out: Floats | None = None) -> Floats:
        """Gradient of the step's mean loss, flat like ``flat``; ``views`` names its parts."""
        bits, weight_bits = gradient_bits(statistics.step_size, self.context_length)
        unit = ldexp(1.0, -bits) / statistics.step_size
        E_unit, W_unit = self.units(weight_bits)
        gradient = np.empty_like(self.flat) if out is None else out
        integers, views = self.views(statistics.vector), self.views(gradient)
        for name, its_unit in {"E": W_unit * unit, "W": E_unit * unit, "b": unit}.items():
            np.multiply(integers[name], its_unit, out=views[name])
        return gradient
