"""One fingerprint in every environment: thread counts, BLAS kernels, numpy's SIMD, numba or not.

Each environment is a process of its own, which trains two runs, writes text and evaluates. What it
prints must be the same everywhere. That the environments do compute with other machine code is
shown by the same process multiplying plain floats.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from numpy._core import _multiarray_umath as umath

# The names of numpy's SIMD code differ from version to version: numpy itself says them.
SIMD = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
WIDE = [name for name in SIMD if "512" in name or name == "X86_V4"]
OURS = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
    "NUMBA_DISABLE_JIT",
)

ENVIRONMENTS = {
    "1 thread": {"OPENBLAS_NUM_THREADS": "1"},
    "2 threads": {"OPENBLAS_NUM_THREADS": "2"},
    "Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
    "no AVX-512": {"NPY_DISABLE_CPU_FEATURES": " ".join(WIDE)},
    "no SIMD": {"NPY_DISABLE_CPU_FEATURES": " ".join(SIMD)},
    "no SIMD, Prescott, 1 thread": {
        "NPY_DISABLE_CPU_FEATURES": " ".join(SIMD),
        "OPENBLAS_CORETYPE": "Prescott",
        "OPENBLAS_NUM_THREADS": "1",
    },
    "numba as plain Python": {"NUMBA_DISABLE_JIT": "1"},
    "no numba": {},
    "no numba, Haswell, 2 threads": {
        "OPENBLAS_CORETYPE": "Haswell",
        "OPENBLAS_NUM_THREADS": "2",
    },
}

PROGRAM = """
import json, sys
if {no_numba}:
    sys.modules["numba"] = None
import numpy as np
from numpy._core import _multiarray_umath as umath
from threadpoolctl import threadpool_info
import minigen
from minigen.model import engines

settings = {{
    "training.steps": 4, "training.batch_size": 200, "tokenizer.vocab_size": 300,
    "optimizer.warmup_steps": 1, "evaluation.every": 4, "sampling.every": 2,
    "sampling.max_new_tokens": 30, "sampling.top_p": 0.9, "sampling.typical_p": 0.9,
}}
same = {{}}
for name in ("adamw", "sgd"):
    config = minigen.Config.load("fables", {{**settings, "optimizer.name": name}})
    run = minigen.Run(config)
    records = run.train()
    same[name] = [
        run.fingerprint,
        [record.metrics() for record in records],
        [record.sample.token_ids for record in records if record.sample],
    ]
x = np.sin(np.arange(640.0 * 80)).reshape(80, 640)
product = x @ x.T
print(json.dumps({{
    "same": same,
    "float": [product.tobytes().hex()[:64], float(product.sum()).hex()],
    "engine": engines.chosen().__name__,
    "kernels": sorted(str(i.get("architecture")) for i in threadpool_info()),
    "simd": [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)],
}}))
"""


# Products of plain floats of many shapes, and nothing of minigen.
PRODUCTS = """
import numpy as np
for n in range(8, 1500, 56):
    x, y = np.ones((n, 144)), np.ones((n, 640))
    x.T @ y, y @ y.T[:, :200], y[:, :300].T @ x
"""


def start(name, program):
    variables = {key: value for key, value in os.environ.items() if key not in OURS}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=variables | ENVIRONMENTS[name],
        capture_output=True,
        text=True,
        check=False,
    )


def train_in(name):
    """What the program reports; None where numpy alone crashes (2.5.5 does, made to be Haswell)."""
    done = start(name, PROGRAM.format(no_numba="no numba" in name))
    if done.returncode < 0 and start(name, PRODUCTS).returncode < 0:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reports():
    with ThreadPoolExecutor(2) as pool:
        found = zip(ENVIRONMENTS, pool.map(train_in, ENVIRONMENTS), strict=True)
        return {name: report for name, report in found if report}


@pytest.mark.parametrize("name", list(ENVIRONMENTS)[1:])
def test_weights_losses_and_samples_are_those_of_the_first_environment(reports, name):
    if name not in reports:
        pytest.skip("numpy itself crashes here: needs another build of numpy")
    assert reports[name]["same"] == reports["1 thread"]["same"]


def test_the_environments_compute_with_other_code(reports):
    """The control: where there is no other code, the test above shows nothing."""
    engines = {report["engine"] for report in reports.values()}
    assert "minigen.model.kernels" in engines
    assert {report["engine"] for name, report in reports.items() if "no numba" in name} == {
        "minigen.model.kernels"
    }
    assert reports["no SIMD"]["simd"] == []
    kernels = {str(report["kernels"]) for report in reports.values()}
    if "Haswell" in str(kernels):  # an OpenBLAS that obeys
        assert len(kernels) >= 2
        assert len({str(report["float"]) for report in reports.values()}) >= 2
