"""The workers experiment: one config, trained by 1, 2, 3 and 4 processes that share a batch."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from minigen.errors import MinigenError
from minigen.proof.floats import with_floats
from minigen.proof.laboratory import Claim, Control, Laboratory, elsewhere
from minigen.training.config import Config
from minigen.training.run import Run
from minigen.training.workers import Workers

COUNTS = (2, 3, 4)  # beside this one process
MOST_STEPS = 8  # since processes that share cores wait for each other
_LAUNCHERS = ("PMI", "OMPI_", "MV2_", "SLURM_")  # whose variables would confuse the next mpiexec


@dataclass(frozen=True)
class Outcome:
    """What so many processes trained, or why they did not."""

    fingerprint: str = ""
    losses: tuple[str, ...] = ()
    float_fingerprint: str = ""
    failure: str = ""
    unavailable: str = ""


class FloatWorkers(Workers):
    """The mistake: sums of plain floats, in order of the workers."""

    def total(self, work: Callable[[], Any], parameters: int) -> Any:
        """Sum what all workers found."""
        return reduce(add, self.communicator.allgather(work()))


def mpiexec() -> str:
    """Return the path of ``mpiexec``, that of this environment first; raise where MPI is absent."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which("mpiexec", path=folders)
    if path is None or importlib.util.find_spec("mpi4py") is None:
        raise MinigenError("MPI is absent (pip install 'minigen[mpi]')")
    return path


def train_with(count: int, start: Path, config_path: Path) -> Outcome:
    """Train from a checkpoint to the end in so many processes, exactly and in plain floats."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    code = "from minigen.proof.workers import report; report()"
    try:
        done = elsewhere(
            code, start, config_path, variables=variables, launcher=[mpiexec(), "-n", str(count)]
        )
    except (MinigenError, OSError) as error:
        return Outcome(unavailable=str(error))
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").split("\n")
        return Outcome(unavailable=f"mpiexec -n {count}: {' '.join(said).strip()[:200]}")
    facts = json.loads(done.stdout)
    return Outcome(**{**facts, "losses": tuple(facts["losses"])})


def report() -> None:
    """Train as the command line says, in step with the other processes; the first one prints."""
    from mpi4py import MPI

    start, config = Path(sys.argv[1]), Config.load(Path(sys.argv[2]))
    workers = Workers(MPI.COMM_WORLD)
    try:
        run = Run.load(start, config=config, workers=workers)
        floats = Run.load(start, config=config, workers=FloatWorkers(MPI.COMM_WORLD))
        with_floats(floats)
        losses = tuple(record.loss.hex() for record in run.train())
        floats.train()
        outcome = Outcome(run.fingerprint, losses, floats.fingerprint)
    except MinigenError as error:
        outcome = Outcome(failure=str(error))
    if workers.rank == 0:
        print(json.dumps(asdict(outcome)))


def workers(lab: Laboratory) -> Claim:
    """Show that the number of processes that share each batch does not change the training."""
    size, steps = max(8, lab.config.training.batch_size), min(lab.steps, MOST_STEPS)
    lab = lab.changed({"training.batch_size": size, "training.steps": steps})
    path = lab.folder / "workers.toml"
    path.write_text(lab.config.to_toml(), encoding="utf-8")
    outcomes = {count: train_with(count, lab.start, path) for count in COUNTS}
    trace = lab.train(lab.run())
    expected = trace[-1].weights, tuple(step.losses for step in trace)
    return judge(expected, outcomes, f"{steps} steps of {size} predictions")


def judge(expected: tuple[str, tuple[str, ...]], outcomes: dict[int, Outcome], what: str) -> Claim:
    """Compare with the fingerprint and losses of this process: number of processes → outcome."""
    floats = {outcome.float_fingerprint for outcome in outcomes.values()} - {""}
    control = Control(
        f"plain float sums in order of the workers: {len(floats)} fingerprints", len(floats) > 1
    )
    absent = [outcome.unavailable for outcome in outcomes.values() if outcome.unavailable]
    wrong = [
        f"{count} processes: {outcome.failure or 'fingerprint ' + outcome.fingerprint[:12]}"
        for count, outcome in outcomes.items()
        if not outcome.unavailable and (outcome.fingerprint, outcome.losses) != expected
    ]
    if wrong:
        return Claim("workers", False, f"not {expected[0][:12]} {'; '.join(wrong)}", control)
    if absent:
        return Claim("workers", None, f"not tested here: {absent[0]}", control)
    evidence = (
        f"{what}, shared by {', '.join(map(str, outcomes))} processes of MPI: "
        "same losses and weights as one process"
    )
    return Claim("workers", True, evidence, control)
