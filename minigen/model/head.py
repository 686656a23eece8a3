"""The output head: hidden representation → logits → log-softmax → loss → gradient p − 1[y]."""

from math import isfinite, ldexp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from minigen.arguments import checked
from minigen.errors import MinigenError, OptionError, shown
from minigen.exact.arithmetic import (
    Floats,
    Integers,
    ceil_log2,
    exact_matmul,
    exact_sum,
    grid_bits,
    integer_exp,
    log,
    round_to_grid,
)


@checked
def project(h: ArrayLike, W: ArrayLike, b: ArrayLike) -> Floats:
    """Logits of a hidden representation: z = h·W + b.

    Shapes: h (N, H) or (H,); W (H, V), or the model's (D, K, V) with H = K·D and h the K context
    embeddings side by side; b (V,). Returns (N, V) or (V,). Both operands of the product are
    rounded once to a grid of about 22 bits, on which the sum is exact whatever its order.
    """
    h, W, b = (np.asarray(x, dtype=np.float64) for x in (h, W, b))
    if W.ndim == 3:
        W = W.transpose(1, 0, 2).reshape(-1, W.shape[2])  # (D, K, V) -> (K·D, V)
    if W.ndim != 2 or h.ndim not in (1, 2) or h.shape[-1] != W.shape[0] or b.shape != W.shape[1:]:
        raise OptionError(
            f"project takes h (N, H), W (H, V) and b (V,) (got {h.shape}, {W.shape}, {b.shape})"
        )
    bits = grid_bits(max(W.shape))
    h_integers, h_unit = round_to_grid(h, bits)
    W_integers, W_unit = round_to_grid(W, bits)
    return exact_matmul(h_integers, W_integers) * (h_unit * W_unit) + b  # (N, V)


def weight_bits(vocab_size: int) -> int:
    """B of ``integer_weights``: V of them, each at most 2^B, add up to at most 2^52."""
    return 52 - ceil_log2(vocab_size)


@np.errstate(over="ignore")  # a gap beyond the largest float is inf: weight 0
def gaps(z: Floats) -> Floats:
    """Return max z − z over the last axis: how far each logit lies below the best one, ≥ 0.

    −inf stands for "never"; a row with NaN, +inf or nothing but −inf raises MinigenError, and so
    does an empty one.
    """
    if z.ndim == 0 or z.shape[-1] == 0:
        raise MinigenError(f"logits must hold at least one number (got shape {z.shape})")
    best = z.max(axis=-1, keepdims=True)
    if not all(map(isfinite, best.ravel().tolist())):  # of one row, twice as fast as numpy
        culprit = best[~np.isfinite(best)][0]
        cause = "all are -inf" if culprit == -np.inf else f"one is {culprit}"
        raise MinigenError(f"logits must hold a finite largest value ({cause}); check the weights")
    gap: Floats = best - z
    return gap


def integer_weights(z: Floats) -> tuple[Floats, Floats]:
    """Softmax in integers: w = rint(exp(z − max z)·2^B), S = Σw, so that p = w/S.

    These weights are probabilities before the division, not what a model has learned. z (..., V);
    returns w (..., V) and S (..., 1), integers held in float64, S ≤ 2^52 exact. A token more than
    about 30 nats below the best has weight 0: it can never be drawn.
    """
    w = integer_exp(gaps(z), weight_bits(z.shape[-1]))
    return w, exact_sum(w, axis=-1, keepdims=True)


def log_partition(S: Floats, vocab_size: int) -> Any:
    """Return ln Σ exp(z − max z) in nats, elementwise, from sums S of the integer weights."""
    return log(S * ldexp(1.0, -weight_bits(vocab_size)))


@checked
def log_softmax(z: ArrayLike) -> Floats:
    """Log-probabilities in nats: (z − max z) − ln Σ exp(z − max z). z (..., V) → (..., V)."""
    z = np.asarray(z, dtype=np.float64)
    gap = gaps(z)
    S = exact_sum(integer_exp(gap, weight_bits(z.shape[-1])), axis=-1, keepdims=True)
    result: Floats = 0.0 - gap - log_partition(S, z.shape[-1])  # 0.0: a sure token has +0
    return result


@checked
def softmax(z: ArrayLike) -> Floats:
    """Probabilities p = w/S. z (..., V) → (..., V)."""
    w, S = integer_weights(np.asarray(z, dtype=np.float64))
    return w / S


@checked
def loss_and_gradient(logits: ArrayLike, target: int) -> tuple[float, Floats]:
    """Cross-entropy of one prediction and its derivative: L = −ln p_y, ∂L/∂z = p − 1[y].

    logits (V,), target an index in [0, V); returns (nats, (V,)).
    """
    z = np.asarray(logits, dtype=np.float64)
    if z.ndim != 1:
        raise OptionError(f"logits must be (V,), those of one prediction (got shape {z.shape})")
    if target not in range(len(z)):
        raise OptionError(
            f"target must be an index of the logits, below {len(z)} (got {shown(target)})"
        )
    gradient = softmax(z)
    gradient[target] -= 1.0
    return 0.0 - float(log_softmax(z)[target]), gradient  # 0.0: a sure token costs +0


def gradient_bits(step_size: int, context_length: int) -> tuple[int, int]:
    """Return (q, a), the bits of d and of the weights in the gradient of a step.

    With N = ``step_size``, K = ``context_length`` and T = 51 − ⌈log₂ N⌉ − ⌈log₂ K⌉: a = ⌊(T − 6)/2⌋
    and q = T − a, so that d has the six bits more that it needs. Bounds: |d| ≤ 2^q; over a row
    Σᵢ|dᵢ| ≤ 3·2^q, since all w·2^q/S add up to 2^q, rint(x) ≤ 2x for x ≥ 0, and the target takes
    off 2^q. No sum has more than N·K such rows, each times weights of at most 2^a: whatever is
    added first, it stays within N·K·3·2^(q + a) ≤ 3·2^51 < 2^53.

    Raises OptionError where too few bits are left to learn from.
    """
    bits = 51 - ceil_log2(step_size) - ceil_log2(context_length)
    a = (bits - 6) // 2
    if bits < 26:
        raise OptionError(
            f"batch_size and context_length must leave the exact gradient at least 10 bits for a "
            f"weight and 16 for a prediction's error (got {step_size} and {context_length}, which "
            f"leave {a} and {bits - a}): ⌈log₂ batch_size⌉ + ⌈log₂ context_length⌉ can be 25"
        )
    return bits - a, a


def integer_gradient(weight: Any, ratio: Any) -> Any:
    """rint(w·(2^q/S)): p in steps of 2^-q; the caller takes off 2^q at the target."""
    return np.rint(weight * ratio)


class Head(NamedTuple):
    """What a batch's predictions take beside their sums of logits, and their losses."""

    unit: float  # of the logits
    bias: Floats  # (V,)
    targets: Integers  # (n,)
    scale: float  # 2^q
    losses: Floats  # (n,), in nats

    def of(self, rows: slice) -> "Head":
        """Return the head of some of the predictions."""
        return self._replace(targets=self.targets[rows], losses=self.losses[rows])


LOSS_UNIT = 2.0**-32  # nats: losses add up as integers of this size
_LOSS_LIMIT = 4096.0  # nats: where one prediction costs more, the weights have blown up


def total_loss(losses: Floats) -> int:
    """Sum of losses (N,) in nats, each rounded once to an integer of ``LOSS_UNIT``."""
    worst = float(losses.max(initial=0.0))
    if not worst < _LOSS_LIMIT:
        raise MinigenError(f"a loss must stay below {_LOSS_LIMIT:g} nats (got {worst:g})")
    integers = np.rint(losses * (1.0 / LOSS_UNIT)).astype(np.int64)
    nats, rest = integers >> 32, integers & 0xFFFFFFFF  # apart, since 2^63 units are soon reached
    return (int(exact_sum(nats)) << 32) + int(exact_sum(rest))
