"""Training: a step against PyTorch's and JAX's on the same batches, and against its bare parts."""

from collections.abc import Callable

import numpy as np

from benchmarks import peers
from benchmarks.harness import Table, rounds
from minigen.exact.arithmetic import exact_matmul
from minigen.exact.streams import Stream
from minigen.model.kernels import multiply, one_hot_contexts
from minigen.model.model import Model
from minigen.model.optimizer import Optimizer
from minigen.text import corpus

SHAPES = [  # N, K, D, V
    (64, 8, 32, 257),
    (256, 8, 64, 257),
    (1024, 8, 64, 257),
    (4096, 8, 64, 257),
    (16384, 8, 64, 257),
    (1024, 16, 64, 512),
    (4096, 8, 64, 1024),
]
OPTIMIZER = {
    "total_steps": 1,
    "name": "adamw",
    "learning_rate": peers.LEARNING_RATE,
    "betas": peers.BETAS,
    "momentum": 0.0,
    "weight_decay": peers.WEIGHT_DECAY,
    "gradient_clip": 0.0,
    "warmup_steps": 0,
    "decay": "constant",
}
AGAINST_PEERS = """
The peers compute in float32, on all cores. A ratio is the median over rounds in which all take
turns, with its middle half in brackets; on a busy machine it moves by a third.

What bounds a step: with few predictions (N = 64) some forty calls of numpy, a microsecond each or
more; with a large vocabulary the three products, which BLAS computes in float64 at half the speed
of float32, and memory, since the table outgrows the cache. What made it fast: inner loops that
use wide instructions (no negative index possible, no sum of floats); table rows only for tokens
that occur at a position; threads of our own with BLAS at one, a product per position. Tried on one
thread, no gain: adding each row to dT at once while it is in cache, scattering by position or by
sorted row, W kept transposed, compiled sums of floats, workspaces for arrays below 32 MB.
"""
AGAINST_LIMIT = """
X·T and Xᵀ·d are scipy's sparse products; *products* the three BLAS products at every position,
on all cores; *exp* is one `numpy.exp` over N × V; *traffic* reads and writes the optimizer's
arrays once.
"""
Batches = list[tuple[np.ndarray, np.ndarray]]


def draw_batches(text: bytes, N: int, K: int, V: int, count: int = 8) -> Batches:
    """Contexts (N, K) and targets (N,) from a text, as training draws them."""
    tokens = corpus.from_memory(text, vocab_size=V).training
    stream = Stream(0, "optimizer")
    draws = [stream.integers(N, len(tokens)) for _ in range(count)]
    return [tokens.contexts_and_targets(indices, K) for indices in draws]


def new_model(shape: tuple[int, ...]) -> tuple[Model, Optimizer]:
    model = Model(*shape)
    model.initialize(Stream(0, "init"))
    return model, Optimizer(model.flat.size, **OPTIMIZER)


def minigen_step(shape: tuple[int, ...], batches: Batches) -> Callable[[], float]:
    model, optimizer = new_model(shape)
    data = list(batches)

    def step() -> float:
        data.append(data.pop(0))
        statistics = model.statistics(*data[0], len(data[0][1]))
        optimizer.update(model.flat, model.gradient(statistics))
        model.changed()
        return statistics.mean_loss

    return step


def bare_parts(shape: tuple[int, ...], batches: Batches) -> dict[str, Callable[[], object]]:
    """Return what a step cannot do without, each alone: the limit it is held against."""
    (V, K, _), (contexts, targets) = shape, batches[0]
    rows, slots = np.unique(contexts + V * np.arange(K), return_inverse=True)
    model, optimizer = new_model(shape)
    flat, moments = model.flat, list(optimizer.moments.values())
    gradient = np.zeros_like(flat)
    E, W = model.parameters["E"], model.parameters["W"]
    tokens = [rows[rows // V == k] % V for k in range(K)]
    T, d = np.ones((len(rows), V)), np.ones((len(targets), V))
    dT, dW = [np.ones((len(x), V)) for x in tokens], np.empty_like(W)
    X = one_hot_contexts(slots.reshape(contexts.shape), len(rows))

    def products(k: int) -> None:
        exact_matmul(E[tokens[k]], W[:, k])
        exact_matmul(E[tokens[k]].T, dT[k], out=dW[:, k])
        exact_matmul(dT[k], W[:, k].T)

    def traffic() -> None:
        for array in (flat, *moments):
            np.add(array, gradient, out=array)

    return {
        "X·T": lambda: X @ T,
        "Xᵀ·d": lambda: X.T @ d,
        "products": lambda: multiply(products, [(k,) for k in range(K)], 3 * T.size * E.shape[1]),
        "exp": lambda: np.exp(d),
        "traffic": traffic,
    }


def run(text: bytes) -> list[Table]:
    against_peers = Table(
        "A training step, ms",
        [*"NKDV", "minigen", "PyTorch", "compiled", "JAX", "fastest peer ÷ minigen", "target"],
        AGAINST_PEERS,
    )
    against_limit = Table(
        "A training step and its bare parts, ms",
        [*"NKDV", "step", "X·T", "Xᵀ·d", "products", "exp", "traffic", "step ÷ sum", "target"],
        AGAINST_LIMIT,
    )
    for N, K, D, V in SHAPES:
        shape, batches = (V, K, D), draw_batches(text, N, K, V)
        contestants = {
            "minigen": minigen_step(shape, batches),
            "torch": peers.torch_step(shape, batches, compiled=False),
            "compiled": peers.torch_step(shape, batches, compiled=True),
            "jax": peers.jax_step(shape, batches),
        }
        times = rounds(contestants)
        ratio = times.ratio(times.fastest("torch", "compiled", "jax"), "minigen")
        target = "" if N < 256 else "2" if N >= 4096 and V == 257 else "1"
        milliseconds = [times[name] * 1e3 for name in contestants]
        against_peers.add(N, K, D, V, *milliseconds, ratio, target)

        parts = bare_parts(shape, batches)
        times = rounds({"step": minigen_step(shape, batches), **parts})
        milliseconds = [times[name] * 1e3 for name in times.seconds]
        total = sum(milliseconds[1:])
        against_limit.add(N, K, D, V, *milliseconds, f"{milliseconds[0] / total:.2f}", "1.5")
    return [against_peers, against_limit]
