"""An update rule turns gradients into new weights and moments, elementwise.

Each is one entry of ``OPTIMIZERS``: the name that a config takes, the loops of both engines, and
the moments in checkpoints follow from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Formula = Callable[..., tuple[Any, ...]]

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
    p: Any, g: Any, velocity: Any, clip: float, keep: float, momentum: float, rate: float
) -> tuple[Any, ...]:
    """One SGD update of p with momentum, the share of the velocity kept; returns (p, velocity)."""
    velocity = momentum * velocity + g * clip
    velocity = velocity * (np.abs(velocity) >= _SMALLEST_FIRST) + 0.0
    return p * keep - rate * velocity, velocity


def _adamw_scalars(
    rate: float, betas: tuple[float, float], beta_powers: tuple[float, float], **_: Any
) -> tuple[float, ...]:
    first, second = beta_powers
    return (*betas, rate / (1.0 - first), 1.0 / float(np.sqrt(1.0 - second)))


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer.

    ``formula`` takes a parameter p, its gradient g, the moments, clip (how much of the gradient
    counts), keep (what weight decay leaves of p) and the scalars, and returns (p, *moments); it is
    written once for arrays and numbers, so that numpy runs it on blocks and numba compiles it.
    ``scalars`` gives those of a step: it asks by name for the learning ``rate``, ``beta_powers``
    (βᵗ of both betas) and keys of the config's ``[optimizer]`` table.
    """

    formula: Formula
    moments: tuple[str, ...]
    scalars: Callable[..., tuple[float, ...]]
    comment: str


OPTIMIZERS = {
    "adamw": UpdateRule(adamw, ("m", "v"), _adamw_scalars, "adapts to each weight"),
    "sgd": UpdateRule(
        sgd, ("m",), lambda momentum, rate, **_: (momentum, rate), "is plain, with momentum"
    ),
}
