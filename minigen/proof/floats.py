"""The control of every claim about sums: the same model as everybody writes it, in plain float64.

``@``, ``np.exp`` and sums in whatever order the library takes: no rule of ``arithmetic.py`` is
kept. Put into a run in place of its model, it is the one thing that changes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minigen.exact.arithmetic import Floats, Integers
from minigen.model.model import Model
from minigen.training.run import Run


@dataclass(frozen=True)
class FloatStatistics:
    """Sums over a batch: the gradient, flat like the parameters, and the loss in nats."""

    gradient: Floats
    loss: float
    count: int
    step_size: int

    def __add__(self, other: "FloatStatistics") -> "FloatStatistics":
        return FloatStatistics(
            self.gradient + other.gradient,
            self.loss + other.loss,
            self.count + other.count,
            self.step_size,
        )

    @property
    def mean_loss(self) -> float:
        """Mean negative log-likelihood in nats."""
        return self.loss / self.count


class FloatModel(Model):
    """The model without exact arithmetic."""

    def hidden(self, contexts: Integers) -> Floats:
        """Hidden representation: the K embeddings side by side. (N, K) → (N, K·D)."""
        return self.parameters["E"][contexts].reshape(len(contexts), -1)

    def head(self) -> Floats:
        """Output head as one matrix, (K·D, V)."""
        return self.parameters["W"].transpose(1, 0, 2).reshape(-1, self.vocab_size)

    def logits(self, contexts: Integers) -> Floats:
        """Logits of contexts (N, K) → (N, V)."""
        z: Floats = self.hidden(contexts) @ self.head() + self.parameters["b"]
        return z

    def statistics(self, contexts: Integers, targets: Integers, step_size: int) -> Any:
        """Gradient sums and loss of predictions: contexts (N, K), targets (N,)."""
        z = self.logits(contexts)  # (N, V)
        exp = np.exp(z - z.max(axis=1, keepdims=True))
        p = exp / exp.sum(axis=1, keepdims=True)
        rows = np.arange(len(targets))
        loss = float(-np.log(p[rows, targets]).sum())
        p[rows, targets] -= 1.0  # now ∂L/∂z
        gradient = np.zeros_like(self.flat)
        views = self.views(gradient)
        D, K, V = views["W"].shape
        dW = self.hidden(contexts).T @ p  # (K·D, V)
        views["W"][...] = dW.reshape(K, D, V).transpose(1, 0, 2)
        np.add.at(views["E"], contexts, (p @ self.head().T).reshape(-1, K, D))
        views["b"][...] = p.sum(axis=0)
        return FloatStatistics(gradient, loss, len(targets), step_size)

    def gradient(self, statistics: Any) -> Floats:
        """Gradient of the step's mean loss, flat like ``flat``."""
        gradient: Floats = statistics.gradient / statistics.step_size
        return gradient


def with_floats(run: Run) -> FloatModel:
    """Give a run the model in plain floats, with the weights that it has; return the model."""
    model = FloatModel(run.model.vocab_size, run.model.context_length, run.model.embedding_dim)
    model.load(run.model.parameters)
    run.model = model
    return model
