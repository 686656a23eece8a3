"""Training: a step against PyTorch's and JAX's on the same batches, and against its bare parts."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.harness import Table, rounds
from benchmarks.shapes import Batches, cases
from minigen.exact.arithmetic import exact_matmul
from minigen.exact.streams import Stream
from minigen.model.gradient import is_cheaper_by_table
from minigen.model.kernels import one_hot
from minigen.model.model import Model
from minigen.model.optimizer import Optimizer
from minigen.model.parallel import in_parallel, resources, scratch, shares

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
Each takes turns of 0.2 s, as in a training. The peers compute on all cores, PyTorch eager, through
`torch.compile` and eager in float64 (64), JAX jitted in both. A ratio is the median over rounds in
which all take turns, with its middle half in brackets; on a busy machine it moves by a third. The
first rows are the shipped configs, on their own documents.

What bounds a step: by contexts the three products, which BLAS computes in float64 at half the speed
of float32; by table those of the rows that occur, at three quarters of that speed since they are
small, and memory, through which the table, the gradients of the logits and their sums pass. With
few predictions it is the passes over the parameters (rounding E and W to both grids, their sums,
the scale, the update) and some eighty calls of numpy, a microsecond each: a hand-over to another
thread takes 50 µs, so that what takes a thread less than a quarter of a millisecond is not shared.
"""
AGAINST_LIMIT = """
By contexts, *products* are the three BLAS products over N × K·D × V; by table they are those of
each position's rows, and *gather* and *scatter* are scipy's sparse X·T and Xᵀ·d. All on all cores.
*exp* is one `numpy.exp` over N × V; *traffic* reads and writes the optimizer's arrays once.
"""
# A training goes on and on: each contestant gets the time to find its pace, and its threads awake.
STEADY: dict[str, Any] = {"seconds": 0.2, "repetitions": 7}
PARTS = ["products", "gather", "scatter", "exp", "traffic"]


def new_model(shape: tuple[int, ...]) -> tuple[Model, Optimizer]:
    model = Model(*shape)
    model.initialize(Stream(0, "init"))
    return model, Optimizer(model.flat.size, **OPTIMIZER)


def minigen_step(shape: tuple[int, ...], batches: Batches) -> Callable[[], float]:
    """Return what a run does in each step, except that the batches are drawn beforehand."""
    model, optimizer = new_model(shape)
    data = list(batches)

    def step() -> float:
        nonlocal model
        data.append(data.pop(0))
        sums = scratch("statistics", model.flat.size)
        statistics = model.statistics(*data[0], len(data[0][1]), out=sums)
        gradient = model.gradient(statistics, out=sums)
        model = model.with_weights(optimizer.update(model.flat, gradient))
        model.check()
        return statistics.mean_loss

    return step


def share(work: Callable[[slice], None], parts: list[slice]) -> None:
    """Do so with BLAS at one thread, as in a step."""
    _, blas = resources()
    with blas.limit(limits=1):
        in_parallel(work, parts)


def bare_parts(shape: tuple[int, ...], batches: Batches) -> dict[str, Callable[[], object]]:
    """Return what a step cannot do without, each alone: the limit it is held against."""
    (V, K, D), (contexts, targets) = shape, batches[0]
    N = len(targets)
    rows, slots = np.unique(contexts + V * np.arange(K), return_inverse=True)
    model, optimizer = new_model(shape)
    flat, moments = model.flat, list(optimizer.moments.values())
    gradient = np.zeros_like(flat)
    d = np.ones((N, V))
    by_table = is_cheaper_by_table(N * K, len(rows), D)
    W, E = np.ones((K, D, V)), np.ones((V, D))

    def traffic() -> None:
        for array in (flat, *moments):
            np.add(array, gradient, out=array)

    if by_table:
        ids = [rows[rows // V == k] % V for k in range(K)]
        T = np.ones((len(rows), V))
        dT = [np.ones((len(x), V)) for x in ids]
        X = one_hot(slots.reshape(contexts.shape), len(rows))

        def products(part: slice) -> None:
            for k in range(part.start, part.stop):
                exact_matmul(E[ids[k]], W[k])
                exact_matmul(E[ids[k]].T, dT[k])
                exact_matmul(dT[k], W[k].T)

        return {
            "products": lambda: share(products, shares(K, 3 * T.size * D // K // 32)),
            "gather": lambda: X @ T,
            "scatter": lambda: X.T @ d,
            "exp": lambda: np.exp(d),
            "traffic": traffic,
        }
    h, flat_W = np.ones((N, K * D)), W.reshape(K * D, V)
    z, dh = np.empty((N, V)), np.empty((N, K * D))

    def dense(part: slice) -> None:
        exact_matmul(h[part], flat_W, out=z[part])
        exact_matmul(h[part].T, d[part], out=scratch("dW of a part", K * D, V))
        exact_matmul(d[part], flat_W.T, out=dh[part])

    return {
        "products": lambda: share(dense, shares(N, 3 * K * D * V // 32)),
        "exp": lambda: np.exp(d),
        "traffic": traffic,
    }


def run(text: bytes) -> list[Table]:
    against_peers = Table(
        "A training step, ms",
        ["config", *"NKDV", "way", "minigen", "PyTorch", "compiled", "JAX", "PyTorch 64", "JAX 64",
         "fastest in float32 ÷ minigen", "target", "in float64 ÷ minigen"],
        AGAINST_PEERS,
    )  # fmt: skip
    against_limit = Table(
        "A training step and its bare parts, ms",
        ["config", *"NKDV", "step", *PARTS, "step ÷ sum", "target"],
        AGAINST_LIMIT,
    )
    for name, (N, K, D, V), batches, target in cases(text):
        shape = (V, K, D)
        contestants = {
            "minigen": minigen_step(shape, batches),
            "torch": peers.torch_step(shape, batches, compiled=False),
            "compiled": peers.torch_step(shape, batches, compiled=True),
            "jax": peers.jax_step(shape, batches),
            "torch 64": peers.torch_step(shape, batches, compiled=False, dtype="float64"),
            "jax 64": peers.jax_step(shape, batches, dtype="float64"),
        }
        times = rounds(contestants, **STEADY)
        ratio = times.ratio(times.fastest("torch", "compiled", "jax"), "minigen")
        in_double = times.ratio(times.fastest("torch 64", "jax 64"), "minigen")
        milliseconds = [times[contestant] * 1e3 for contestant in contestants]
        parts = bare_parts(shape, batches)
        way = "table" if "gather" in parts else "contexts"
        against_peers.add(name, N, K, D, V, way, *milliseconds, ratio, target, in_double)

        times = rounds({"step": contestants["minigen"], **parts}, **STEADY)
        cells = [times[part] * 1e3 if part in parts else "" for part in PARTS]
        total = sum(times[part] for part in parts)
        share = f"{times['step'] / total:.2f}"
        wanted = "1.5" if N >= 256 else ""
        against_limit.add(name, N, K, D, V, times["step"] * 1e3, *cells, share, wanted)
    return [against_peers, against_limit]
