"""The engine runs the hot loops of training: numba's where it is installed, else numpy's.

Nothing in them depends on order, so the two agree bit for bit and the choice goes by speed alone.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from minigen.exact.arithmetic import Floats, Integers
from minigen.model.head import Head
from minigen.model.rules import Formula


class Engine(Protocol):
    """The loops that an engine has."""

    def scatter(self, d: Floats, slots: Integers, total: Floats) -> None:
        """Total += Xᵀ·d: add row n of d (n, V) to the rows of ``total`` (R, V) in slots[n] (K,)."""

    def gradients(self, logits: Floats, slots: Integers, head: Head, d: Floats) -> None:
        """Fill d (n, V) with p − 1[y] in steps of 1/scale, and the head's losses.

        A prediction's logits are the K rows of ``logits`` (R, V) that its slots (n, K) name, added
        up: integers in steps of ``unit``. d may be ``logits``, where slots count its own rows.
        """

    def elementwise(
        self,
        formula: Formula,
        arrays: Sequence[Floats],
        scalars: Sequence[float],
        out: Sequence[Floats],
    ) -> None:
        """Fill flat arrays with a formula of others: out[0], … = formula(*arrays, *scalars)."""


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
