"""The environment experiment: one run in sub-processes that compute with other machine code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_info

from minigen.errors import MinigenError
from minigen.proof.floats import with_floats
from minigen.proof.laboratory import Claim, Laboratory, claim
from minigen.training.config import Config
from minigen.training.run import Run
from minigen.training.workers import Workers, from_mpiexec

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
            "VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS")  # fmt: skip
_KERNELS = ("OPENBLAS_CORETYPE", "OPENBLAS_VERBOSE", "NPY_DISABLE_CPU_FEATURES")
_LAUNCHERS = ("PMI", "OMPI_", "MV2_", "SLURM_")  # whose variables would confuse the next mpiexec
_LIMIT = 600  # seconds, after which another process counts as hung


@dataclass(frozen=True)
class Environment:
    """Variables that a sub-process starts with, and whether it may use numba."""

    name: str
    variables: dict[str, str]
    numba: bool = True


def threads(count: int) -> dict[str, str]:
    """Return the variables that allow so many threads."""
    return dict.fromkeys(_THREADS, str(count))


def simd_features() -> list[str]:
    """Return the names that numpy's SIMD code beyond its baseline has on this machine.

    They differ between versions of numpy, so it is asked itself.
    """
    from numpy._core import _multiarray_umath as umath  # type: ignore[attr-defined]

    return [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]


def environments() -> list[Environment]:
    """Return what this machine may offer; a kernel that the BLAS does not have changes nothing."""
    simd = simd_features()
    wide = [name for name in simd if "512" in name or name == "X86_V4"]
    variables: dict[str, dict[str, str]] = {
        "1 thread": {},
        "2 threads": threads(2),
        "BLAS kernel Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
        "BLAS kernel Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
    }
    if wide:
        variables["numpy without AVX-512"] = {"NPY_DISABLE_CPU_FEATURES": " ".join(wide)}
    if simd:
        variables["numpy at its baseline"] = {"NPY_DISABLE_CPU_FEATURES": " ".join(simd)}
    return [
        *(Environment(name, changed) for name, changed in variables.items()),
        Environment("without numba", {}, numba=False),
    ]


# ── Processes that train ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """What processes trained, exactly and in plain floats, or their ``failure``.

    ``kernel`` is what their BLAS computed with. An ``unavailable`` one says nothing of minigen.
    """

    fingerprint: str = ""
    float_fingerprint: str = ""
    kernel: str = ""
    losses: list[str] = field(default_factory=list)
    failure: str = ""
    unavailable: bool = False


class FloatWorkers(Workers):
    """The mistake: sums of plain floats, in order of the workers."""

    def total(self, work: Callable[[], Any], parameters: int) -> Any:
        """Sum what all workers found."""
        return reduce(add, self.communicator.allgather(work()))


def start(
    *arguments: object,
    variables: Mapping[str, str],
    launcher: Sequence[str] = (),
    numba: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Call ``report`` in another process, or in those of a launcher."""
    code = "from minigen.proof.environments import report; report()"
    if not numba:
        code = f"import sys; sys.modules['numba'] = None; {code}"
    kept = {name: value for name, value in variables.items() if not name.startswith(_LAUNCHERS)}
    path = [str(Path(__file__).parents[2]), *sys.path[1:]]
    return subprocess.run(
        [*launcher, sys.executable, "-P", "-c", code, *map(str, arguments)],
        env={**kept, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_LIMIT,
        check=False,
    )


def report() -> None:
    """Train the config of the command line, and from a checkpoint its twin in plain floats.

    The first process prints the outcome as JSON; the others share its batches.
    """
    workers = from_mpiexec()
    try:
        config = Config.load(Path(sys.argv[1]))
        run = Run(config, workers=workers)
        careless = FloatWorkers(workers.communicator) if workers.size > 1 else workers
        floats = Run.load(sys.argv[2], config=config, workers=careless)
        floats.corpus = run.corpus
        with_floats(floats)
        records = [] if "--only-floats" in sys.argv else run.train()
        floats.train()
        losses = [record.loss.hex() for record in records]
        kernels = {
            f"{library['internal_api']} {library.get('architecture', '')}".strip()
            for library in threadpool_info()
            if library["user_api"] == "blas"
        }
        outcome = Outcome(run.fingerprint, floats.fingerprint, " + ".join(sorted(kernels)), losses)
    except MinigenError as error:
        outcome = Outcome(failure=str(error))
    if workers.rank == 0:
        print(json.dumps(asdict(outcome)))


def differences(expected: tuple[str, list[str]], outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Return who trained to another fingerprint or with other losses, and to which."""
    return {
        name: outcome.failure
        or (
            f"fingerprint {outcome.fingerprint[:12]}, not {expected[0][:12]}"
            if outcome.fingerprint != expected[0]
            else "other losses"
        )
        for name, outcome in outcomes.items()
        if not outcome.unavailable and (outcome.fingerprint, outcome.losses) != expected
    }


def count_floats(outcomes: Mapping[str, Outcome]) -> int:
    """Return how many fingerprints the plain floats gave."""
    return len({outcome.float_fingerprint for outcome in outcomes.values()} - {""})


# ── The experiment ───────────────────────────────────────────────────────────────────────────────


def train_in(environment: Environment, config_path: Path, checkpoint: Path) -> Outcome:
    """Train a config, and from a checkpoint its twin in plain floats, in a sub-process."""
    variables = {name: value for name, value in os.environ.items() if name not in _KERNELS}
    call = partial(
        start,
        config_path,
        checkpoint,
        variables=variables | threads(1) | environment.variables,
        numba=environment.numba,
    )
    done = call()
    if done.returncode < 0:
        # Where plain numpy is killed by a signal too, its machine code is not for this processor.
        plain = call("--only-floats")
        signal = f"killed by signal {-done.returncode}"
        return Outcome(failure=signal, unavailable=plain.returncode < 0)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Outcome(failure=lines[-1] if lines else f"exit status {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def environment(lab: Laboratory) -> Claim:
    """Show that one config gives one fingerprint, whatever the machine computes with."""
    path, offered = lab.config_file(), environments()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(lambda one: train_in(one, path, lab.start), offered))
    named = {one.name: outcome for one, outcome in zip(offered, outcomes, strict=True)}
    blindness = lab.blindness() if count_floats(named) < 2 else ""  # it trains twice more
    return judge(lab.expected(), named, blindness)


def judge(
    expected: tuple[str, list[str]], outcomes: Mapping[str, Outcome], blindness: str = ""
) -> Claim:
    """Compare with the fingerprint and losses of this process: environment → outcome."""
    tried = {name: outcome for name, outcome in outcomes.items() if not outcome.unavailable}
    kernels = sorted({outcome.kernel for outcome in tried.values()} - {""})
    floats = count_floats(tried)
    listed, left_out = ", ".join(tried), ", ".join(sorted(outcomes.keys() - tried.keys()))
    is_alike = len(kernels) < 2 and floats < 2
    return claim(
        "environment",
        f"{len(tried)} sub-processes ({listed}; {', '.join(kernels)}): "
        f"one fingerprint, {expected[0][:12]}…"
        + (f"; left out, since plain numpy crashes there: {left_out}" if left_out else ""),
        differences(expected, outcomes),
        f"the same model in plain float64: {floats} fingerprints",
        floats > 1,
        untested=f"one BLAS kernel ({', '.join(kernels)}); {listed} agree"
        if is_alike
        else blindness * (floats < 2),
    )
