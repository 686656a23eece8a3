"""The control of every claim about sums: the model of ``plain`` in place of a run's own.

Its sums come in whatever order the library takes; it is the one thing that changes.
"""

from typing import Any

import numpy as np

from minigen.exact.arithmetic import Floats, Integers
from minigen.model.gradient import Statistics
from minigen.model.head import LOSS_UNIT
from minigen.model.model import Model
from minigen.proof import plain
from minigen.training.run import Run


class FloatModel(Model):
    """The model without exact arithmetic."""

    def hidden(self, contexts: Integers) -> Floats:
        """Hidden representation: the K embeddings side by side. (N, K) → (N, K·D)."""
        return plain.hidden(self.parameters["E"], contexts)

    def logits(self, contexts: Integers) -> Floats:
        """Logits of contexts (N, K) → (N, V)."""
        return plain.logits(self.parameters, contexts)

    def statistics(
        self, contexts: Integers, targets: Integers, step_size: int, out: Floats | None = None
    ) -> Statistics:
        """Gradient sums and loss, which are not rounded: contexts (N, K), targets (N,)."""
        loss, gradient = plain.loss_and_gradient(self.parameters, contexts, targets)
        flat = np.concatenate([gradient[name].ravel() for name in self.parameters])
        units: Any = loss / LOSS_UNIT
        return Statistics(flat, units, len(targets), step_size)

    def gradient(self, statistics: Statistics, out: Floats | None = None) -> Floats:
        """Gradient of the step's mean loss, flat like ``flat``."""
        gradient: Floats = statistics.vector / statistics.step_size
        return gradient


def with_floats(run: Run) -> FloatModel:
    """Give a run the model in plain floats, with the weights that it has; return the model."""
    model = FloatModel(run.model.vocab_size, run.model.context_length, run.model.embedding_dim)
    model.load(run.model.parameters)
    run.model = model
    return model
