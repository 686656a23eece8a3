"""The environment experiment: one run in sub-processes that compute with other machine code."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_info

from minigen.proof.floats import with_floats
from minigen.proof.laboratory import Claim, Control, Laboratory, elsewhere
from minigen.training.config import Config
from minigen.training.run import Run

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
            "VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS")  # fmt: skip
_OURS = (*_THREADS, "OPENBLAS_CORETYPE", "OPENBLAS_VERBOSE", "NPY_DISABLE_CPU_FEATURES")


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


@dataclass(frozen=True)
class Outcome:
    """What a sub-process reported, or why it reported nothing."""

    fingerprint: str = ""
    float_fingerprint: str = ""
    kernel: str = ""
    failure: str = ""
    unavailable: bool = False


def train_in(environment: Environment, config_path: Path, start: Path) -> Outcome:
    """Train a config, and from a checkpoint its twin in plain floats, in a sub-process."""
    done = _start(environment, config_path, start)
    if done.returncode < 0:
        # Where plain numpy is killed by a signal too, its machine code is not for this processor.
        plain = _start(environment, config_path, start, "--only-floats")
        signal = f"killed by signal {-done.returncode}"
        return Outcome(failure=signal, unavailable=plain.returncode < 0)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Outcome(failure=lines[-1] if lines else f"exit status {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def _start(environment: Environment, *arguments: Any) -> subprocess.CompletedProcess[bytes]:
    code = "from minigen.proof.environments import report; report()"
    if not environment.numba:
        code = f"import sys; sys.modules['numba'] = None; {code}"
    variables = {name: value for name, value in os.environ.items() if name not in _OURS}
    return elsewhere(code, *arguments, variables=variables | threads(1) | environment.variables)


def report() -> None:
    """Train the config of the command line, exactly and in floats; print what came of it."""
    config = Config.load(Path(sys.argv[1]))
    run, floats = Run(config), Run.load(sys.argv[2], config=config)
    floats.corpus = run.corpus
    with_floats(floats)
    if "--only-floats" not in sys.argv:
        run.train()
    floats.train()
    kernels = {
        f"{library['internal_api']} {library.get('architecture', '')}".strip()
        for library in threadpool_info()
        if library["user_api"] == "blas"
    }
    facts = {
        "fingerprint": run.fingerprint,
        "float_fingerprint": floats.fingerprint,
        "kernel": " + ".join(sorted(kernels)),
    }
    print(json.dumps(facts))


def environment(lab: Laboratory) -> Claim:
    """Show that one config gives one fingerprint, whatever the machine computes with."""
    path = lab.folder / "environment.toml"
    path.write_text(lab.config.to_toml(), encoding="utf-8")
    offered = environments()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(lambda one: train_in(one, path, lab.start), offered))
    run = lab.run()
    lab.train(run)
    return judge(run.fingerprint, {e.name: o for e, o in zip(offered, outcomes, strict=True)})


def judge(fingerprint: str, outcomes: dict[str, Outcome]) -> Claim:
    """Compare fingerprints with the one of this process: environment → outcome."""
    tried = {name: outcome for name, outcome in outcomes.items() if not outcome.unavailable}
    wrong = [
        f"{name}: {outcome.failure or 'fingerprint ' + outcome.fingerprint[:12]}"
        for name, outcome in tried.items()
        if outcome.fingerprint != fingerprint
    ]
    kernels = {outcome.kernel for outcome in tried.values()} - {""}
    floats = {outcome.float_fingerprint for outcome in tried.values()} - {""}
    control = Control(
        f"the same model in plain float64: {len(floats)} fingerprints", len(floats) > 1
    )
    listed = ", ".join(tried)
    if wrong:
        return Claim("environment", False, f"not {fingerprint[:12]} {'; '.join(wrong)}", control)
    if len(kernels) < 2 and not control.caught:
        evidence = f"not tested here: one BLAS kernel ({', '.join(kernels)}); {listed} agree"
        return Claim("environment", None, evidence, control)
    left_out = ", ".join(outcomes.keys() - tried.keys())
    evidence = (
        f"{len(tried)} sub-processes ({listed}; {', '.join(sorted(kernels))}): "
        f"one fingerprint, {fingerprint[:12]}…"
        + (f"; left out, since plain numpy crashes there: {left_out}" if left_out else "")
    )
    return Claim("environment", True, evidence, control)
