"""The benchmarks measure what the product's own users run."""

from pathlib import Path

from benchmarks import shapes
from minigen import Config

TEXT = b"A fox saw the grapes.\n\nThe grapes were high.\n\n" * 40


def test_no_shipped_config_is_absent_from_the_benchmark_of_training():
    found = {name: shape for name, shape, *_ in shapes.cases(TEXT) if name}
    files = (Path(__file__).parents[1] / "configs").glob("*.toml")
    assert found.keys() == {path.stem for path in files}
    for name, (N, K, D, _) in found.items():
        config = Config.load(name)
        assert config.training.batch_size == N
        assert (config.model.context_length, config.model.embedding_dim) == (K, D)
