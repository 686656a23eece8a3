"""The engine runs the hot loops of training: numba's where it is installed, else numpy's.

Nothing in them depends on order, so the two agree bit for bit and the choice goes by speed alone.
"""

import warnings
from functools import cache
from typing import Protocol

from minigen.exact.arithmetic import Floats, Integers
from minigen.model.rules import UpdateRule


class Engine(Protocol):
    """The loops that an engine has."""

    BLOCK: int
    """How many logits it likes to work on at once."""

    def gather(self, table: Floats, slots: Integers) -> Floats:
        """X·T of one-hot contexts: the K rows of T (R, V) that ``slots`` (N, K) name, added up.

        Returns (N, V), which the next call overwrites.
        """

    def scatter(self, d: Floats, slots: Integers, total: Floats) -> None:
        """Total += Xᵀ·d: add each row of d (N, V) to the K rows of ``total`` (R, V)."""

    def gradients(
        self,
        z: Floats,
        unit: float,
        bias: Floats,
        targets: Integers,
        scale: float,
        gap: Floats,
        S: Floats,
    ) -> None:
        """Replace integer logits z (N, V), in steps of ``unit``, by their gradient d = p − 1[y].

        d in steps of 1/scale: ``head.integer_gradient``. Fills what the losses follow from: gap
        (N,) of the targets, in nats, and S (N,), the sum of the integer weights.
        """

    def sum_of_squares(self, x: Floats, per_unit: float, scale: float) -> float:
        """Σ ``arithmetic.integer_square`` over a flat array."""

    def update(
        self,
        rule: UpdateRule,
        weights: Floats,
        gradient: Floats,
        moments: tuple[Floats, ...],
        scalars: tuple[float, ...],
        out: tuple[Floats, ...],
    ) -> None:
        """Apply an elementwise rule of the optimizer: out = (weights, *moments) = rule(…)."""


@cache
def chosen() -> Engine:
    """Return the engine; it is imported here, since generation does without scipy and numba."""
    try:
        from minigen.model import kernels_numba

        return kernels_numba
    except ImportError:
        pass
    except Exception as error:  # numba reaches deep into Python, numpy and the machine
        warnings.warn(f"trains without numba, which fails to load: {error}", stacklevel=2)
    from minigen.model import kernels

    return kernels
