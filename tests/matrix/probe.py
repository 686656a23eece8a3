"""What is run in each environment: train some configs, write a text, print one line of JSON.

Its arguments name what to run, by default all. It knows nothing of the environment that it is in.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from typing import Any

import minigen
from minigen.proof.floats import with_floats
from minigen.proof.sharing import environment

_QUIET = {"evaluation.every": 0, "sampling.every": 0, "training.steps": 60}
_FABLES = {  # stated, so that another default config leaves the page's rows comparable
    "tokenizer.vocab_size": 1024,
    "model.embedding_dim": 40,
    "training.batch_size": 512,
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.5,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fables": ("fables", _FABLES),
    "names": ("names", {}),
    "sgd": ("fables", _FABLES | {"optimizer.name": "sgd", "training.steps": 40}),
    "bytes": ("fables", _FABLES | {"tokenizer.vocab_size": 257, "training.steps": 40}),
    "large": ("fables", _FABLES | {"training.batch_size": 8192, "training.steps": 2}),
}
EXACT = (*CONFIGS, "text")
"""What must have the same bits everywhere: configs, and a text of the model ``fables``."""
NAMES = (*EXACT, "floats")
"""What there is to run: those, and plain floats' ``fables``."""


def run_of(name: str, workers: Any = None) -> Any:
    """Return the run of that name, before its first step."""
    base, changed = CONFIGS[name]
    return minigen.Run(minigen.Config.load(base, overrides=_QUIET | changed), workers=workers)


def probe(names: list[str], workers: Any = None) -> dict[str, Any]:
    """Return what this environment is, by name what came out, and what it cost, in seconds."""
    results: dict[str, str] = {}
    fables = None
    for name in names:
        if name == "text":
            fables = fables or trained("fables", workers)
            results[name] = text_of(fables)
        elif name == "floats":
            run = run_of("fables")
            with_floats(run)
            run.train()
            results[name] = run.fingerprint
        else:
            run = trained(name, workers)
            fables = run if name == "fables" else fables
            results[name] = run.fingerprint
    return {
        "environment": environment(),
        "results": results,
        "seconds": round(time.process_time(), 1),
    }


def trained(name: str, workers: Any) -> Any:
    """Return the run of that name, after its last step."""
    run = run_of(name, workers)
    run.train()
    return run


def text_of(run: Any) -> str:
    """Return the SHA-256 of two texts, one sampled and one greedy."""
    generator = run.generator
    sampled = generator.generate("Once", max_new_tokens=80, temperature=0.8, top_p=0.95, seed=1)
    greedy = generator.generate("The fox", max_new_tokens=40, temperature=0.0)
    ids = [list(map(int, written.token_ids)) for written in (sampled, greedy)]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def main() -> None:
    """Probe; under mpiexec all processes do, and the first one prints."""
    workers = None
    if os.environ.get("MATRIX_WORKERS"):
        from mpi4py import MPI

        workers = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MINIGEN_CACHE"] = cache  # the text is cut and its merges are learned here
        found = probe(sys.argv[1:] or [*NAMES], workers)
    if workers is None or workers.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
