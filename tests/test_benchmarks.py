"""The benchmarks measure the shapes of all shipped configs, so that the product's own job is seen."""

import ast
from pathlib import Path

from minigen import Config

ROOT = Path(__file__).parents[1]


def test_no_shipped_config_is_absent_from_the_benchmark_of_training(monkeypatch):
    """Its peers need not be installed: the functions that name the cases are run without them."""
    tree = ast.parse((ROOT / "benchmarks" / "training.py").read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"))
        and "peers" not in ast.dump(node)
        and not (isinstance(node, ast.FunctionDef) and node.name == "run")
    ]
    room = {"__file__": str(ROOT / "benchmarks" / "training.py")}
    exec(compile(tree, "training.py", "exec"), room)
    text = b"A fox saw the grapes.\n\nThe grapes were high.\n\n" * 40
    found = {name: shape[:3] for name, shape, *_ in room["cases"](text) if name}
    configs = {path.stem: Config.load(path.stem) for path in (ROOT / "configs").glob("*.toml")}
    assert found == {
        name: (config.training.batch_size, config.model.context_length, config.model.embedding_dim)
        for name, config in configs.items()
    }
