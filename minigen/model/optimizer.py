"""The optimizer: one elementwise rule over all parameters at once, and its schedule."""

from inspect import signature
from math import ldexp
from typing import Any

import numpy as np

from minigen.errors import OptionError
from minigen.exact.arithmetic import (
    Floats,
    ceil_log2,
    cos,
    exact_sum,
    grid_unit,
    integer_square,
    largest_magnitude,
)
from minigen.model import engines
from minigen.model.parallel import recycled, scratch
from minigen.model.rules import OPTIMIZERS

_PI = 3.141592653589793


def norm(x: Floats) -> float:
    """Euclidean norm √Σx² of x (P,): its squares add up to at most 2^53 grid steps."""
    unit = grid_unit(largest_magnitude(x), 0)
    scale = ldexp(1.0, 53 - ceil_log2(x.size))
    squares = scratch("squares", x.size)
    engines.chosen().elementwise(integer_square, [x], (1.0 / unit, scale), [squares])
    return float(np.sqrt(exact_sum(squares) / scale)) * unit


class Optimizer:
    """The state of the update rule: moments, flat like the parameters, and the step count.

    Arguments are the keys of the config's ``[optimizer]`` table and the steps of the schedule;
    ``options`` are those that single rules ask for; one that none asks for raises OptionError.
    """

    def __init__(
        self,
        size: int,
        *,
        total_steps: int,
        name: str,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        gradient_clip: float,
        warmup_steps: int,
        decay: str,
        **options: Any,
    ):
        asked = {key for rule in OPTIMIZERS.values() for key in signature(rule.scalars).parameters}
        for key in sorted(options.keys() - asked):
            raise OptionError(f"optimizer.{key} has no effect: no rule of OPTIMIZERS asks for it")
        self.name = name
        self.peak_learning_rate, self.total_steps = learning_rate, total_steps
        self.betas, self.options = betas, options
        self.weight_decay, self.gradient_clip = weight_decay, gradient_clip
        self.warmup_steps, self.decay = warmup_steps, decay
        self.moments = {name: np.zeros(size) for name in OPTIMIZERS[name].moments}
        self.step = 0
        self.rate = 0.0  # of the latest update
        self._beta_powers = (1.0, 1.0)

    def resume(self, step: int) -> None:
        """Take up after ``step`` updates; βᵗ is the same product of t factors as it was then."""
        self.step, self._beta_powers = step, (1.0, 1.0)
        for _ in range(step):
            before = self._beta_powers
            self._advance_beta_powers()
            if self._beta_powers == before:  # as small as can be, and so for ever
                break

    def _advance_beta_powers(self) -> None:
        first, second = self._beta_powers
        self._beta_powers = (first * self.betas[0], second * self.betas[1])

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step-th update, from 1: linear warm-up, then the decay.

        The decay starts from the peak at the first step behind the warm-up and would reach 0 one
        step behind the last: linear 1 − t, cosine (1 + cos πt)/2.
        """
        if step <= self.warmup_steps:
            return self.peak_learning_rate * (step / self.warmup_steps)
        t = (step - 1 - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.decay == "cosine":
            return self.peak_learning_rate * (0.5 + 0.5 * float(cos(_PI * t)))
        return self.peak_learning_rate * {"constant": 1.0, "linear": 1.0 - t}[self.decay]

    def update(self, parameters: Floats, gradient: Floats) -> Floats:
        """Take one step from flat parameters (P,); returns the new ones.

        The gradient's norm is clipped to ``gradient_clip`` (0 = never). The moments are new arrays,
        too, so that a copy of this optimizer keeps the old ones.
        """
        self.step += 1
        self._advance_beta_powers()
        self.rate = rate = self.learning_rate(self.step)
        keep = 1.0 - rate * self.weight_decay
        clip = 1.0
        if self.gradient_clip > 0.0:
            length = norm(gradient)
            clip = self.gradient_clip / length if length > self.gradient_clip else 1.0
        rule = OPTIMIZERS[self.name]
        scalars = rule.scalars(
            rate=rate, betas=self.betas, beta_powers=self._beta_powers, **self.options
        )
        old = parameters, gradient, *self.moments.values()
        new = [recycled(parameters.size) for _ in (parameters, *self.moments)]
        engines.chosen().elementwise(rule.formula, old, (clip, keep, *scalars), new)
        self.moments = dict(zip(self.moments, new[1:], strict=True))
        return new[0]
