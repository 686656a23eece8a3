"""The workers experiment: one config, trained by 1, 2, 3 and 4 processes that share a batch."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from minigen.errors import MinigenError
from minigen.proof.environments import Outcome, count_floats, differences, start
from minigen.proof.laboratory import Claim, Laboratory, claim

COUNTS = (2, 3, 4)  # beside this one process
MOST_STEPS = 8  # since processes that share cores wait for each other


def mpiexec() -> str:
    """Return the path of ``mpiexec``, that of this environment first; raise where MPI is absent."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which("mpiexec", path=folders)
    if path is None or importlib.util.find_spec("mpi4py") is None:
        raise MinigenError("MPI is absent (pip install 'minigen[mpi]')")
    return path


def train_with(count: int, config_path: Path, checkpoint: Path) -> Outcome:
    """Train a config, and from a checkpoint its twin in plain floats, in so many processes."""
    try:
        launcher = [mpiexec(), "-n", str(count)]
        done = start(config_path, checkpoint, variables=os.environ, launcher=launcher)
    except (MinigenError, OSError) as error:
        return Outcome(failure=str(error), unavailable=True)
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").split("\n")
        failure = f"mpiexec -n {count}: {' '.join(said).strip()[:200]}"
        return Outcome(failure=failure, unavailable=True)
    return Outcome(**json.loads(done.stdout))


def workers(lab: Laboratory) -> Claim:
    """Show that the number of processes that share each batch does not change the training."""
    size, steps = max(8, lab.config.training.batch_size), min(lab.steps, MOST_STEPS)
    lab = lab.changed({"training.batch_size": size, "training.steps": steps})
    path = lab.config_file()
    outcomes = {f"{count} processes": train_with(count, path, lab.start) for count in COUNTS}
    what = f"{steps} steps of {size} predictions"
    blindness = lab.blindness() if count_floats(outcomes) < 2 else ""  # it trains twice more
    return judge(lab.expected(), outcomes, what, blindness)


def judge(
    expected: tuple[str, list[str]],
    outcomes: Mapping[str, Outcome],
    what: str,
    blindness: str = "",
) -> Claim:
    """Compare with the fingerprint and losses of this process: "2 processes" → outcome."""
    absent = [outcome.failure for outcome in outcomes.values() if outcome.unavailable]
    floats = count_floats(outcomes)
    counts = ", ".join(name.partition(" ")[0] for name in outcomes)
    return claim(
        "workers",
        f"{what}, shared by {counts} processes of MPI: same losses and weights as one process",
        differences(expected, outcomes),
        f"plain float sums in order of the workers: {floats} fingerprints",
        floats > 1,
        untested=absent[0] if absent else blindness * (floats < 2),
    )
