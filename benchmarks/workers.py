"""Workers: a step for one and two processes here, what they send, and more of them on paper.

Started by mpiexec, as `python -m benchmarks.workers N K D V TEXT`, it measures one contestant.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Table, Times
from minigen import Config, Run
from minigen.model.gradient import Statistics
from minigen.proof.workers import mpiexec

SHAPES = [(256, 6, 24, 640), (4096, 6, 24, 640), (16384, 8, 64, 257)]  # N, K, D, V
CONTESTANTS = {"1 worker, 1 thread": (1, 1), "1 worker, 2 threads": (1, 2), "2 workers": (2, 1)}
STEPS, WARM_UP, REPETITIONS = 25, 5, 5
NETWORKS = {  # bytes/s, seconds of latency
    "1 Gbit/s Ethernet": (1e9 / 8, 50e-6),
    "10 Gbit/s Ethernet": (10e9 / 8, 20e-6),
    "100 Gbit/s InfiniBand": (100e9 / 8, 2e-6),
}
PAPER = (64, [2**10, 2**13, 2**16, 2**19])  # workers; predictions a step


class Counted:
    """A communicator that counts the bytes handed to its sums, and the seconds they take."""

    def __init__(self, communicator: Any):
        self.communicator, self.bytes, self.seconds = communicator, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.communicator, name)

    def Allreduce(self, place: Any, array: Any, op: Any) -> None:  # noqa: N802 (mpi4py's name)
        """Do as the communicator does, and count."""
        start = time.perf_counter()
        self.communicator.Allreduce(place, array, op=op)
        self.seconds += time.perf_counter() - start
        self.bytes += array.nbytes


def config_of(N: int, K: int, D: int, V: int, text: Path) -> Config:
    return Config.load(
        "fables",
        {
            "corpus.text": [str(text)],
            "corpus.validation_fraction": 0.0,
            "tokenizer.vocab_size": V,
            "model.context_length": K,
            "model.embedding_dim": D,
            "training.batch_size": N,
            "training.steps": WARM_UP + STEPS,
            "evaluation.every": 0,
            "sampling.every": 0,
        },
    )


def contestant(shape: list[int], text: Path) -> dict[str, float]:
    """Median seconds of a step, of its sums and of what every worker does alike; bytes a step.

    Asserts that the bytes are those of the formula: a number for each parameter, and three more;
    one worker alone sends none.
    """
    from mpi4py import MPI

    communicator = Counted(MPI.COMM_WORLD)
    run = Run(config_of(*shape, text), workers=communicator)
    numbers = run.model.flat.size + 3 if run.workers.size > 1 else 0
    steps, sums, alike, sizes = [], [], [], []
    gradient, update = run.model.gradient, run.optimizer.update

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if isinstance(arguments[0], Statistics):
                assert communicator.bytes == 8 * numbers
            start = time.perf_counter()
            result = function(*arguments, **named)
            alike[-1] += time.perf_counter() - start
            return result

        return call

    run.model.gradient, run.optimizer.update = timed(gradient), timed(update)
    for _ in range(WARM_UP + STEPS):
        communicator.bytes, communicator.seconds = 0, 0.0
        alike.append(0.0)
        start = time.perf_counter()
        run.train(1)
        steps.append(time.perf_counter() - start)
        sums.append(communicator.seconds)
        sizes.append(communicator.bytes)
    return {
        "step": median(steps[WARM_UP:]),
        "sums": median(sums[WARM_UP:]),
        "alike": median(alike[WARM_UP:]),
        "bytes": median(sizes[WARM_UP:]),
    }


def measure(shape: tuple[int, ...], text: Path, workers: int, threads: int) -> dict[str, float]:
    command = [mpiexec(), "-n", str(workers), sys.executable, "-m", "benchmarks.workers"]
    done = subprocess.run(
        [*command, *map(str, shape), str(text)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": str(threads)},
        capture_output=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def on_paper(work: float, alike: float, size: float, workers: int, network: str) -> float:
    """Seconds a step: a share of the work, what all do alike, and the sum."""
    bandwidth, latency = NETWORKS[network]
    sending = 2 * (workers - 1) / workers * size / bandwidth
    return work / workers + alike + sending + 2 * ceil(log2(workers)) * latency


def run(text: bytes) -> list[Table]:
    here = Table(
        "A step shared by workers on this machine",
        ["N", "K", "D", "V", *(f"{name}, ms" for name in CONTESTANTS),
         "2 workers ÷ 1, a thread each", "of it the sum, ms", "MB a step"],
        "Each process holds one thread where there are two of them. The sum includes the wait for "
        "the slower one.",
    )  # fmt: skip
    workers, sizes = PAPER
    paper = Table(
        f"A step on paper: one process with one thread, and {workers} of them",
        ["N", "1 worker, ms", *(f"{name}, ms" for name in NETWORKS)],
        "A model of K=6, D=24, V=640: measured work a prediction, measured time for what all "
        "workers do alike, and 2·(p − 1)/p·bytes over the bandwidth.",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(text)
        for shape in SHAPES:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for _ in range(REPETITIONS):
                for name, (count, threads) in CONTESTANTS.items():
                    found[name].append(measure(shape, path, count, threads))
            times = Times({name: [one["step"] for one in ones] for name, ones in found.items()})
            alone, _, two = CONTESTANTS
            sums = median(one["sums"] for one in found[two]) * 1e3
            sent = found[two][0]["bytes"] / 1e6
            milliseconds = [times[name] * 1e3 for name in CONTESTANTS]
            here.add(*shape, *milliseconds, times.ratio(two, alone), sums, sent)
            if shape == SHAPES[1]:
                alike = median(one["alike"] for one in found[alone])
                a_prediction = (times[alone] - alike) / shape[0]
                size = found[two][0]["bytes"]
    for N in sizes:
        work = a_prediction * N
        predicted = [on_paper(work, alike, size, workers, name) * 1e3 for name in NETWORKS]
        paper.add(N, (work + alike) * 1e3, *predicted)
    return [here, paper]


if __name__ == "__main__":
    result = contestant([int(n) for n in sys.argv[1:5]], Path(sys.argv[5]))
    if int(os.environ.get("PMI_RANK", "0")) == 0:
        print(json.dumps(result))
