"""The model: an embedding and one linear map per context position, z = Σₖ E[xₖ]·W[:, k, :] + b.

It is linear in one-hot contexts: z = X·T + b, where row (v, k) of the table T is E[v]·W[:, k, :].
One table a step replaces N products; in generation it is the cache of what was read so far.
"""

import hashlib
import threading
from collections.abc import Mapping
from math import ldexp
from typing import Any, Self

import numpy as np

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
    to_two_grids,
)
from minigen.exact.streams import Stream
from minigen.model import engines
from minigen.model.gradient import Batch, Grids, Statistics, cut
from minigen.model.head import Head, gradient_bits
from minigen.model.parallel import scratch
from minigen.text.tokenizer import require_tokens

_ROOM = 1 << 23  # numbers of the table that are kept, or twice the weights if these are more

PARAMETERS = ("E", "W", "b")


def fingerprint(parameters: Mapping[str, Floats]) -> str:
    """SHA-256 over E, W, b: name, NUL, shape as decimals joined by commas, NUL, ``<f8`` bytes."""
    digest = hashlib.sha256()
    for name in PARAMETERS:
        tensor = np.ascontiguousarray(parameters[name], dtype="<f8")
        digest.update(f"{name}\0{','.join(map(str, tensor.shape))}\0".encode())
        digest.update(tensor.reshape(-1).data)
    return digest.hexdigest()


class Model:
    """Parameters E (V, D), W (D, K, V), b (V,) and what follows from them.

    ``parameters`` are views of one flat array, ``flat``, so that the optimizer is one loop; who
    changes them calls ``changed()``. Training changes no model: each step makes another, so that
    any number of threads may read the one that they have. Raises MinigenError where this process
    does not compute as the bits need it.
    """

    def __init__(self, vocab_size: int, context_length: int, embedding_dim: int):
        self.vocab_size, self.context_length = vocab_size, context_length
        self.embedding_dim = embedding_dim
        V, K, D = vocab_size, context_length, embedding_dim
        self.flat = np.zeros(V * (D + D * K + 1))
        selfcheck.check(K * D, V)
        self.bits = grid_bits(max(K * D, V))
        self._offsets = np.arange(K)  # of the rows of a token, one a position
        self._most_kept = max(_ROOM, 2 * self.flat.size) // (K * V)  # tokens
        self._derive()

    def _derive(self) -> None:
        self.parameters = self.views(self.flat)
        self._filling = threading.RLock()
        self.changed()

    def __repr__(self) -> str:
        listed = ", ".join(f"{name} {x.shape}" for name, x in self.parameters.items())
        return f"Model({self.flat.size:,} weights: {listed})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights: what two runs compare."""
        return fingerprint(self.parameters)

    def with_weights(self, flat: Floats) -> Self:
        """Return a model like this one that has the weights ``flat`` (P,), which become its own."""
        twin = object.__new__(type(self))
        twin.__setstate__({**self.__getstate__(), "flat": flat})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived: the views of a copy, or a pickle, are of its own array."""
        derived = ("parameters", "_filling", "_largest", "_grids", "_kept")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._derive()

    def views(self, flat: Floats) -> dict[str, Floats]:
        """Cut a flat array (P,) into named views of the parameters' shapes."""
        parts = cut(flat, self.vocab_size, self.context_length, self.embedding_dim)
        return dict(zip(PARAMETERS, parts, strict=True))

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
        # Of the table, K rows for each token met so far, where they begin, and how many there are.
        # Rows are only ever added to what a reader may hold: it finds all three, or the next three.
        self._kept = (np.empty((0, self.vocab_size)), np.full(self.vocab_size, -1), 0)

    def units(self, bits: int) -> tuple[float, float]:
        """Units of grids of so many bits, one for all of E and one for all of W."""
        if self._largest is None:
            self._largest = [largest_magnitude(x) for x in self.parameters.values()]
        E, W, _ = [grid_unit(largest, bits) for largest in self._largest]
        return E, W

    def check(self) -> None:
        """Raise MinigenError where a parameter is not finite or too large for any grid."""
        self.units(self.bits)

    def grids(self) -> Grids:
        """E and W on the grid of the logits, kept until the parameters change."""
        if self._grids is None:
            self.check()
            E, W = self.parameters["E"], self.parameters["W"]
            self._grids = Grids(*round_to_grid(E, self.bits), *round_to_grid(W, self.bits))
        return self._grids

    def grids_of_step(self, bits: int) -> tuple[Grids, Grids]:
        """E and W on the grid of the logits, and on one of so many bits, rounded in one pass."""
        forward, backward = list[Any](), list[Any]()
        for name, *units in zip("EW", self.units(self.bits), self.units(bits), strict=True):
            x = self.parameters[name]
            out = [scratch(f"{way} {name}", *x.shape) for way in ("forward", "backward")]
            per_unit, flat = [1.0 / unit for unit in units], [y.reshape(-1) for y in out]
            engines.chosen().elementwise(to_two_grids, [x.reshape(-1)], per_unit, flat)
            forward += out[0], units[0]
            backward += out[1], units[1]
        return Grids(*forward), Grids(*backward)

    def table(self, tokens: Integers) -> tuple[Floats, float]:
        """Rows of T for the given tokens (U,): integers (U, K, V) and their unit."""
        E, E_unit, W, W_unit = self.grids()
        rows = exact_matmul(E[tokens], W.reshape(self.embedding_dim, -1))  # (U, K·V)
        return rows.reshape(len(tokens), *W.shape[1:]), E_unit * W_unit  # (U, K, V)

    def hidden(self, contexts: Integers) -> Floats:
        """Hidden representation: the grid's K embeddings side by side. (N, K) → (N, K·D)."""
        E, E_unit, _, _ = self.grids()
        return (E[contexts] * E_unit).reshape(len(contexts), -1)

    def logits(self, contexts: Integers) -> Floats:
        """Logits of contexts (N, K) → (N, V), from the table rows of the tokens met so far.

        The same bits as ``head.project(self.hidden(contexts), W, b)``, alone or in any batch.
        Raises OptionError for what is no token.
        """
        require_tokens(contexts, self.vocab_size)
        _, E_unit, W, W_unit = self.grids()
        rows, first_rows, kept = self._kept
        if first_rows[contexts].min(initial=0) < 0:
            with self._filling:
                rows, first_rows, kept = self._kept = self._with_rows_of(contexts)
        if kept:
            terms = rows.take((first_rows[contexts] + self._offsets).T, axis=0)  # (K, N, V)
            sums = exact_sum(terms, axis=0)  # (N, V)
        else:  # no room for the rows of all these tokens
            sums = exact_matmul(self.grids().hidden(contexts), W.reshape(-1, self.vocab_size))
        z: Floats = sums * (E_unit * W_unit) + self.parameters["b"]  # (N, V)
        return z

    def _with_rows_of(self, contexts: Integers) -> tuple[Floats, Integers, int]:
        """Return what is kept and the rows of all these tokens; of other tokens if there is room.

        Where even theirs have none, nothing is kept.
        """
        K, V = self.context_length, self.vocab_size
        rows, first_rows, start = self._kept
        tokens = np.unique(contexts)
        new = tokens[first_rows[tokens] < 0]
        if start + len(new) * K > len(rows):  # start over, in memory that is used as it is filled
            rows = np.empty((min(V, self._most_kept) * K, V))
            first_rows, start, new = np.full(V, -1), 0, tokens
        stop = start + len(new) * K
        if stop > len(rows):
            return rows, first_rows, 0
        rows[start:stop] = self.table(new)[0].reshape(-1, V)
        first_rows = first_rows.copy()
        first_rows[new] = np.arange(start, stop, K)
        return rows, first_rows, stop

    def statistics(
        self, contexts: Integers, targets: Integers, step_size: int, out: Floats | None = None
    ) -> Statistics:
        """Gradient sums and loss of predictions: contexts (N, K), targets (N,).

        ``step_size`` is the number of predictions of the whole step, of which these may be a part.
        The sums are written to ``out`` (P,), if it is given.
        """
        contexts, targets = (np.ascontiguousarray(x, np.int64) for x in (contexts, targets))
        require_tokens(contexts, self.vocab_size)
        require_tokens(targets, self.vocab_size)
        bits, weight_bits = gradient_bits(step_size, self.context_length)
        forward, backward = self.grids_of_step(weight_bits)
        vector = np.empty_like(self.flat) if out is None else out
        unit, losses = forward.E_unit * forward.W_unit, np.empty(len(targets))
        head = Head(unit, self.parameters["b"], targets, ldexp(1.0, bits), losses)
        batch = Batch(contexts, head, forward, backward)
        return Statistics(vector, batch.add_up(vector), len(targets), step_size)

    def gradient(self, statistics: Statistics, out: Floats | None = None) -> Floats:
        """Gradient (P,) of the step's mean loss, like ``flat``; ``views`` names its parts."""
        bits, weight_bits = gradient_bits(statistics.step_size, self.context_length)
        unit = ldexp(1.0, -bits) / statistics.step_size
        E_unit, W_unit = self.units(weight_bits)
        gradient = np.empty_like(self.flat) if out is None else out
        integers, views = self.views(statistics.vector), self.views(gradient)
        for name, its_unit in {"E": W_unit * unit, "W": E_unit * unit, "b": unit}.items():
            np.multiply(integers[name], its_unit, out=views[name])
        return gradient
