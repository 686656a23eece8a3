"""What test_workers.py and test_sweep.py let the processes of a real mpiexec do.

`python -m tests.training.workers_job JOB ARGUMENT…` runs a function of this file; the first worker
prints what it returns as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

from minigen import Config, Run, cli
from minigen.errors import MinigenError
from minigen.model import engines as engine_room
from minigen.model import kernels, parallel
from minigen.model.gradient import Statistics
from minigen.signals import heard_by
from minigen.training import workers
from minigen.training.pool import pool
from minigen.training.workers import Workers
from tests.conftest import TINY

WORLD = MPI.COMM_WORLD


def engines() -> list[ModuleType]:
    """Return every engine that is installed."""
    return list({module.__name__: module for module in (kernels, engine_room.chosen())}.values())


def runs(text: str, *changes: str) -> list[Any]:
    """Train with each engine and each change of the tiny config: metrics, texts, fingerprint."""
    results = []
    for engine in engines():
        engine_room.chosen = lambda engine=engine: engine  # type: ignore[assignment]
        for change in changes:
            run = Run(Config.load("fables", TINY | json.loads(change)), text=text, workers=WORLD)
            records = run.train()
            texts = [record.sample.text for record in records if record.sample]
            lines = [record.metrics() for record in records]
            positions = {name: stream.position for name, stream in run.streams.items()}
            results.append([lines, texts, run.fingerprint, positions])
    assert all(other == results for other in WORLD.allgather(results))
    return results


def exchanges() -> dict[str, Any]:
    """Let three workers exchange all kinds of things."""
    return {
        "threads": threads(),
        "total": total(),
        "stops": stops(),
        "turns": turns(),
        "signals": signals(),
        "errors": errors(),
    }


def threads() -> Any:
    """Tell how many threads each worker has, and how many there were."""
    allowed = parallel.resources()[0]
    return [allowed, WORLD.allgather((Workers(WORLD), parallel.resources()[0])[1])]


def stops() -> Any:
    """Tell who knows that it should stop, before and after a total, and once nobody asks."""
    group, none = Workers(WORLD), Statistics(np.zeros(2), 0, 0, 8)
    told = []
    for asks in (False, True, False):
        group.asked_to_stop = asks and WORLD.rank == 1
        told.append(WORLD.allgather(group.is_stopping()))
        group.total(lambda: none, 2)
        told.append(WORLD.allgather(group.is_stopping()))
    return told


def signals() -> Any:
    """Tell who hears a signal while a pool is open."""
    heard: list[int] = []
    with heard_by(lambda *_: heard.append(WORLD.rank)), pool(Workers(WORLD), 1):
        signal.raise_signal(signal.SIGTERM)
    return WORLD.allgather(heard)


def total() -> Any:
    """Sum hand-made statistics, of the last worker none."""
    mine = [3 * 2**62 - 1, 5, 0][WORLD.rank]
    part = Statistics(np.array([3 * 2.0**50, -1.0 - WORLD.rank]), mine, 4, 8)
    none = Statistics(np.zeros(2), 0, 0, 8)
    summed = Workers(WORLD).total(lambda: part if WORLD.rank < 2 else none, 2)
    return [summed.vector.tolist(), summed.loss, summed.count, summed.step_size]


def errors() -> list[list[str]]:
    """Return what each worker is told where something goes wrong with one, or with all of them."""
    group = Workers(WORLD)
    config = Config.load("fables", TINY)

    def fail(who: Any) -> Any:
        if WORLD.rank in who:
            raise MinigenError("it broke")
        return Statistics(np.zeros(9), 0, 0, 8)

    other_seed = config.override({"run.seed": WORLD.rank})
    attempts = [
        lambda: group.total(lambda: fail([1]), 9),
        lambda: group.total(lambda: fail([0, 1, 2]), 9),
        lambda: group.each(lambda: fail([2])),
        lambda: group.from_first(lambda: fail([0])),
        lambda: group.agree({"size": "3", "colour": f"{WORLD.rank // 2}"}),
        lambda: Run(config, text="abc" * (1 + WORLD.rank // 2), workers=group),
        lambda: Run(other_seed, text="abc", workers=group),
    ]
    told = []
    for attempt in attempts:
        try:
            attempt()
            told.append("")
        except MinigenError as error:
            told.append(str(error) if type(error) is MinigenError else repr(error))
    return [list(texts) for texts in zip(*WORLD.allgather(told), strict=True)]


def turns() -> Any:
    """Tell who does what: the first worker of the machine goes before the others."""
    group, path = Workers(WORLD), Path("left")
    found = group.each(lambda: path.exists() or bool(path.write_text("x") and False))
    done = group.from_first(lambda: WORLD.rank)
    return [WORLD.allgather(found), WORLD.allgather(done)]


def command(trouble: str, *arguments: str) -> None:
    """Run the command line with something that happens to one worker in its fifth step."""
    # Seconds: a worker that fails alone need not wait longer, and a busy machine takes its time.
    workers._PATIENCE = 0.2 if trouble.startswith("failed") else 60.0
    take_step = Run._take_step

    def troubled(run: Run) -> Any:
        if run.step == 4 and WORLD.rank == int(trouble[-1]):
            happening[trouble[:-1]]()
        return take_step(run)

    def fail() -> None:
        raise MemoryError("no memory left")

    happening = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "asked": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "failed": fail,
        "quiet": lambda: None,
    }
    Run._take_step = troubled  # type: ignore[method-assign]
    if WORLD.rank > 0:  # these see another disk
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")
    sys.exit(cli.run(list(arguments)))


if __name__ == "__main__":
    returned = globals()[sys.argv[1]](*sys.argv[2:])
    if WORLD.rank == 0:
        print(json.dumps(returned))
