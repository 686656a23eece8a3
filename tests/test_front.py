"""The package's front: what is shown, what is typed, and what a misspelt name is told."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minigen

ROOT = Path(__file__).parents[1]


def typed_names() -> set[str]:
    """The names that a type checker sees."""
    tree = ast.parse((ROOT / "minigen/__init__.py").read_text())
    (branch,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_what_a_type_checker_sees_is_what_can_be_imported() -> None:
    assert typed_names() == set(minigen.__all__)
    assert all(getattr(minigen, name) is not None for name in minigen.__all__)


def test_completion_shows_the_public_names_and_no_others() -> None:
    shown = {name for name in dir(minigen) if not name.startswith("__")}
    assert shown == set(minigen.__all__)
    assert "__version__" in dir(minigen)
    assert minigen.__version__.startswith("0.")


@pytest.mark.parametrize(("name", "meant"), [("Confg", "Config"), ("Polic", "Policy")])
def test_a_misspelt_name_is_told_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(
        AttributeError, match=f"no attribute '{name}'; the nearest known .* {meant}$"
    ):
        getattr(minigen, name)


def test_things_say_what_they_are() -> None:
    run = minigen.Run(minigen.Config.load("names", {"training.steps": 3}))
    assert repr(run) == f"Run(step 0 of 3, no loss yet, fingerprint {run.fingerprint[:12]}…)"
    (record,) = run.train(1)
    assert repr(run).startswith(f"Run(step 1 of 3, loss {record.loss:.4f}, ")
    assert "E (257, " in repr(run.model)
    assert repr(run.streams["init"]).startswith("Stream(seed=0, name='init', position=")
    assert repr(run.generator).startswith("Generator(Model(")
    html = run._repr_html_()
    assert run.fingerprint in html
    assert len(html) < 1000


# ── Types ────────────────────────────────────────────────────────────────────────────────────────

USER = """\
import minigen

config: minigen.Config = minigen.Config.load("fables", overrides={"training.steps": 200})
rate: float = config.optimizer.learning_rate
top_k: int | None = config.sampling.top_k
run = minigen.Run(config)
losses: list[float] = [record.loss for record in run.train(100)]
text: str = run.generate("Once", max_new_tokens=80, temperature=0.8)
model = minigen.load("runs/fables")
one: str = model.generate("Once", seed=0, stop=["a", "b"]).text
several: list[str] = [t.text for t in model.generate(["Once", "Then"], num_samples=2)]
best: float | None = model.beams("Once", num_beams=4)[0].score
ids: list[int] = [candidate.token_id for candidate in model.next("Once", top=10).candidates]
version: str = minigen.__version__
"""
FAULTS = {
    "config.training.stepps": "attr-defined",
    "config.sampling.temprature": "attr-defined",
    "minigen.Confg": "attr-defined",
    "run.generate('Once', temprature=0.3)": "call-arg",
    "model.generate('Once', temprature=0.3)": "call-overload",
    "model.generate('Once', top_p='high')": "call-overload",
    "list(model.stream('Once', max_tokens=3))": "call-arg",
    "minigen.Policy(top_q=1)": "call-arg",
}


def test_a_strict_type_checker_accepts_a_right_script_and_finds_each_fault(tmp_path: Path) -> None:
    faulty = USER + "".join(f"{line}\n" for line in FAULTS)
    (tmp_path / "faulty.py").write_text(faulty)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-error-summary"]
    command += [f"--cache-dir={ROOT / '.mypy_cache'}", "faulty.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    first = USER.count("\n") + 1
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    codes = {int(line.split(":")[1]) - first: line.rpartition("[")[2][:-1] for line in found}
    assert codes == dict(enumerate(FAULTS.values())), done.stdout + done.stderr
