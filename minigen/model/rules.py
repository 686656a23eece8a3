"""An update rule turns gradients into new weights and moments, elementwise: AdamW, or SGD.

Written once for arrays and scalars alike, so that numpy runs it on blocks and numba compiles it.
"""

from typing import Any

import numpy as np

_EPSILON = 1e-8  # AdamW's guard against division by zero
_SMALLEST_FIRST = 2.0**-400  # moments below these become +0 by our own rule, since some
_SMALLEST_SECOND = 2.0**-800  # libraries flush subnormal numbers and some do not


def adamw(
    p: Any, g: Any, m: Any, v: Any, clip: float, keep: float, beta1: float, beta2: float,
    rate: float, spread: float,
) -> tuple[Any, ...]:  # fmt: skip
    """One AdamW update of a parameter p with gradient g; returns (p, m, v).

    keep = 1 − learning rate·weight decay; rate and spread hold the bias corrections: learning
    rate/(1 − β₁ᵗ) and 1/√(1 − β₂ᵗ). Source: Loshchilov and Hutter, "Decoupled weight decay", 2019.
    """
    g = g * clip
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * (g * g)
    m = m * (np.abs(m) >= _SMALLEST_FIRST) + 0.0
    v = v * (v >= _SMALLEST_SECOND) + 0.0
    return p * keep - rate * m / (np.sqrt(v) * spread + _EPSILON), m, v


def sgd(
    p: Any, g: Any, momentum: Any, clip: float, keep: float, decay: float, rate: float
) -> tuple[Any, ...]:
    """One SGD update with momentum (decay of the velocity) of p; returns (p, momentum)."""
    momentum = decay * momentum + g * clip
    momentum = momentum * (np.abs(momentum) >= _SMALLEST_FIRST) + 0.0
    return p * keep - rate * momentum, momentum
