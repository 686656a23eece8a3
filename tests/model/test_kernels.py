"""The two engines of training, numpy and compiled, and any number of threads: the same bits."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from minigen.errors import MinigenError
from minigen.exact.streams import Stream
from minigen.model import engines, gradient, kernels, parallel
from minigen.model.model import Model
from minigen.model.optimizer import Optimizer
from minigen.model.rules import OPTIMIZERS

numba = pytest.importorskip(
    "minigen.model.kernels_numba", reason="needs numba: pip install 'minigen[fast]'"
)

# N, K, D, V: one of each; odd sizes; a block of rows and more; several blocks and threads
SHAPES = [(1, 1, 1, 2), (5, 3, 2, 7), (67, 8, 5, 257), (3000, 2, 4, 512), (200, 5, 16, 1031)]
OPTIONS = {
    "total_steps": 10,
    "learning_rate": 0.05,
    "betas": (0.9, 0.99),
    "momentum": 0.9,
    "weight_decay": 0.1,
    "gradient_clip": 0.5,
    "warmup_steps": 2,
    "decay": "cosine",
}


def numbers(*shape: int, name: str = "numbers") -> np.ndarray:
    """Evenly spread in ±1."""
    return 2.0 * Stream(0, name).uniforms(int(np.prod(shape))).reshape(shape) - 1.0


def train(shape: tuple[int, int, int, int], optimizer_name: str) -> list[bytes]:
    """All that three steps leave, to the last bit."""
    N, K, D, V = shape
    model = Model(V, K, D)
    model.initialize(Stream(0, "init"))
    optimizer = Optimizer(model.flat.size, name=optimizer_name, **OPTIONS)
    stream, left = Stream(0, "batches"), []
    for _ in range(3):
        contexts = stream.integers(N * K, V).reshape(N, K)
        statistics = model.statistics(contexts, stream.integers(N, V), N)
        gradient = model.gradient(statistics)
        model = model.with_weights(optimizer.update(model.flat, gradient))
        left += [statistics.vector.tobytes(), str(statistics.loss).encode(), gradient.tobytes()]
        left += [model.flat.tobytes(), *(moment.tobytes() for moment in optimizer.moments.values())]
    return left


@pytest.fixture
def threads(monkeypatch):
    """Set the number of threads, and let every loop be shared out, however small."""

    def set_to(number: int) -> None:
        _, blas = parallel.resources()
        monkeypatch.setattr(parallel, "resources", lambda: (number, blas))
        monkeypatch.setattr(parallel, "GRAIN", 1)

    return set_to


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_engine_leaves_the_same_bits_as_numpy(shape, optimizer, monkeypatch):
    left = {}
    for engine in (kernels, numba):
        monkeypatch.setattr(engines, "chosen", lambda engine=engine: engine)
        left[engine] = train(shape, optimizer)
    assert left[kernels] == left[numba]


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 6), st.integers(2, 300)),
    distinct=st.integers(1, 300),
    spread=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_both_ways_to_the_gradient_give_the_same_bits_in_both_engines(
    shape, distinct, spread, seed
):
    """Over shapes and tokens: few or many that share a row, sure and unsure predictions."""
    N, K, D, V = shape
    model, stream = Model(V, K, D), Stream(seed, "x")
    model.initialize(stream)
    model.flat *= spread
    model.changed()
    contexts = stream.integers(N * K, min(V, distinct)).reshape(N, K)
    targets, found = stream.integers(N, V), set()
    with pytest.MonkeyPatch.context() as patch:
        for engine in (kernels, numba):
            patch.setattr(engines, "chosen", lambda engine=engine: engine)
            for passes in (np.inf, -np.inf):
                patch.setattr(gradient, "PASSES", passes)
                statistics = model.statistics(contexts, targets, N)
                found.add((statistics.vector.tobytes(), statistics.loss))
    assert len(found) == 1


def test_the_cheaper_way_is_by_contexts_where_few_predictions_share_a_row(monkeypatch):
    taken = []
    for name in ("_by_contexts", "_by_table"):
        way = getattr(gradient.Batch, name)
        monkeypatch.setattr(
            gradient.Batch, name, lambda *given, n=name, way=way: taken.append(n) or way(*given)
        )
    for N, K, D, V in ((1, 1, 1, 257), (256, 4, 64, 4096), (4096, 8, 64, 257)):
        model, stream = Model(V, K, D), Stream(0, "x")
        model.statistics(stream.integers(N * K, V).reshape(N, K), stream.integers(N, V), N)
    assert taken == ["_by_contexts", "_by_contexts", "_by_table"]


@pytest.mark.parametrize("passes", [np.inf, -np.inf], ids=["by contexts", "by table"])
@pytest.mark.parametrize("engine", [kernels, numba], ids=["numpy", "numba"])
def test_the_number_of_threads_does_not_change_a_bit(engine, passes, threads, monkeypatch):
    """Nor does it that a helper takes several parts, as where there are more parts than helpers."""
    monkeypatch.setattr(engines, "chosen", lambda: engine)
    monkeypatch.setattr(gradient, "PASSES", passes)
    left = []
    for number in (1, 2, 5):
        threads(number)
        left.append(train((67, 3, 5, 257), "adamw"))
    assert left[0] == left[1] == left[2]


def test_blas_is_held_at_one_thread_while_statistics_are_made(monkeypatch):
    multiply, held = gradient.exact_matmul, set()

    def watched(*operands, **options):
        libraries = threadpool_info()  # none where BLAS is one that cannot be asked
        held.update(one["num_threads"] for one in libraries if one["user_api"] == "blas")
        return multiply(*operands, **options)

    monkeypatch.setattr(gradient, "exact_matmul", watched)
    parallel.resources.cache_clear()  # scipy may have brought a BLAS of its own since
    parallel.resources()
    with threadpool_limits(2, user_api="blas"):
        train((67, 3, 5, 257), "sgd")
    assert held <= {1}


@pytest.mark.parametrize("passes", [np.inf, -np.inf], ids=["by contexts", "by table"])
@pytest.mark.parametrize("block", [1, 257 * 10, 257 * 66, 257 * 67])
def test_the_size_of_a_block_does_not_change_a_bit(block, passes, monkeypatch):
    expected = train((67, 3, 5, 257), "adamw")
    monkeypatch.setattr(gradient, "PASSES", passes)
    monkeypatch.setattr(gradient, "BLOCK", block)
    assert train((67, 3, 5, 257), "adamw") == expected


@pytest.mark.parametrize("engine", [kernels, numba], ids=["numpy", "numba"])
@pytest.mark.parametrize("culprit", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("name", ["E", "W", "b"])
def test_parameters_out_of_range_stop_the_step_in_either_engine(engine, culprit, name, monkeypatch):
    monkeypatch.setattr(engines, "chosen", lambda: engine)
    model = Model(7, 2, 3)
    model.parameters[name].reshape(-1)[1] = culprit
    model.changed()
    with pytest.raises(MinigenError, match=r"finite and below 2\^400"):
        model.statistics(np.zeros((4, 2), np.int64), np.zeros(4, np.int64), 4)


ABSENT = "import sys; sys.modules['numba'] = None"
BROKEN = """
import builtins
usual = builtins.__import__
def without(name, *rest):
    if name == "numba":
        raise SystemError("built for another numpy")
    return usual(name, *rest)
builtins.__import__ = without
"""


@pytest.mark.parametrize(
    ("numba_is", "told"),
    [
        (ABSENT, []),
        (BROKEN, ["trains without numba, which fails to load: built for another numpy"]),
    ],
)
def test_where_numba_is_not_numpys_engine_is_chosen_and_a_broken_one_is_told(numba_is, told):
    assert engines.chosen() is numba
    code = (
        f"{numba_is}\nimport warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    from minigen.model import engines, kernels; assert engines.chosen() is kernels\n"
        f"assert [str(one.message) for one in said] == {told}, said"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
