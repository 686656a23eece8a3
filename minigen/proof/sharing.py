"""A stranger's row: what a machine is, and the fingerprints that it gives, to be pasted somewhere.

It names versions and kinds of hardware, and no person, host, path or time.
"""

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from threadpoolctl import threadpool_info

from minigen.model import engines
from minigen.proof.environments import simd_features
from minigen.proof.floats import with_floats
from minigen.proof.laboratory import Claim, Laboratory
from minigen.training.checkpoint import FORMAT
from minigen.training.config import Config, deciding_differences

_LIBRARIES = ("numpy", "scipy", "numba", "tokenizers", "safetensors", "pydantic", "mpi4py")


def environment() -> dict[str, str]:
    """Return what decides which machine code computes here: name → value, without identity."""
    blas = [
        f"{library['internal_api']} {library['version']} {library.get('architecture', '')}".strip()
        + f", threads: {library['num_threads']}"
        for library in threadpool_info()
        if library["user_api"] == "blas"
    ]
    return {
        "minigen": f"{_version('minigen')}, format {FORMAT}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}, "
        f"{sys.byteorder}-endian, {sys.maxsize.bit_length() + 1} bit",
        "processor": _processor(),
        **{name: _version(name) for name in _LIBRARIES},
        "blas": "; ".join(sorted(set(blas))) or "none that says its name",
        "simd": " ".join(simd_features()) or "numpy's baseline",
        "engine": getattr(engines.chosen(), "__name__", "").rpartition(".")[2],
    }


def fingerprints(config: Config) -> dict[str, str]:
    """Train the config as the experiments do: cut down to some steps, exactly and in floats."""
    laboratory = Laboratory(config)
    exact, floats = laboratory.run(), laboratory.run()
    laboratory.train(exact)
    with_floats(floats)
    laboratory.train(floats)
    return {
        "text": exact.corpus_sha256,
        "steps": str(laboratory.steps),
        "fingerprint": exact.fingerprint,
        "plain floats": floats.fingerprint,
    }


def settings(config: Config) -> str:
    """Say what decides the weights: the keys that are not as in the config ``fables``."""
    changed = deciding_differences(Config.load("fables"), config)
    listed = [f"{key} = {value!r}" for key, _, value in changed if key != "corpus.text"]
    return ", ".join(["fables", *listed])


def facts(config: Config, claims: Sequence[Claim]) -> dict[str, str]:
    """Return all of the row: name → value."""
    verdicts = {True: "holds", False: "FAILS", None: "untested"}
    return {
        **environment(),
        "config": settings(config),
        **fingerprints(config),
        "claims": ", ".join(f"{claim.name} {verdicts[claim.holds]}" for claim in claims),
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or "unknown")
