"""The package's front: what is shown, what is typed, and what a misspelt name is told."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import minigen
from docs import api
from minigen.decoding.policy import DEFAULTS, OPTIONS
from minigen.training.keys import KEYS
from tests.conftest import TINY

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


def tiny() -> minigen.Run:
    return minigen.Run(minigen.Config.load(overrides=TINY))


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


def test_the_page_about_the_library_is_made_of_its_docstrings() -> None:
    made = api.page()
    assert api.PAGE.read_text(encoding="utf-8") == made, "to make it anew: make docs"
    assert api.public_names().keys() == set(minigen.__all__)
    assert all(f"\n## minigen.{name}" in made for name in minigen.__all__)


WRONG_TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "a config by number": (
        lambda: minigen.Config.load(5),
        "a config must be a str or Path (got 5)",
    ),  # type: ignore[arg-type]
    "overrides as text": (
        lambda: minigen.Config.load(overrides="training.steps=3"),  # type: ignore[arg-type]
        "overrides must map keys to values",
    ),
    "a key by number": (
        lambda: minigen.Config.load(overrides={5: 3}),  # type: ignore[dict-item]
        "unknown key 5",
    ),
    "a run of a name": (lambda: minigen.Run("fables"), "config must be a Config (got 'fables')"),  # type: ignore[arg-type]
    "steps in words": (lambda: tiny().train("5"), "steps must be a whole number (got '5')"),  # type: ignore[arg-type]
    "half a step": (lambda: tiny().train(2.5), "steps must be a whole number (got 2.5)"),  # type: ignore[arg-type]
    "a step too many": (lambda: tiny().train(7), "from 0 to the 6 left"),
    "a model by number": (lambda: minigen.load(5), "a model must be a str or Path (got 5)"),  # type: ignore[arg-type]
    "a stream of a name": (lambda: minigen.Stream("a", "b"), "seed must be a whole number"),  # type: ignore[arg-type]
    "a text by number": (lambda: minigen.ByteTokenizer().encode(5), "must be a str or bytes"),  # type: ignore[arg-type]
    "a proof of a name": (lambda: next(minigen.prove("fables")), "config must be a Config"),  # type: ignore[arg-type]
    "a sweep of a name": (lambda: minigen.sweep("fables", {}, out="x"), "config must be a Config"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", WRONG_TYPES)
def test_a_wrong_type_gets_one_line(mistake: str) -> None:
    call, message = WRONG_TYPES[mistake]
    with pytest.raises(minigen.OptionError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_config_key_is_explained_where_help_shows_it() -> None:
    for name, key in KEYS.items():
        table = getattr(minigen.Config.load(), name.partition(".")[0])
        assert f"{name} = {key.default!r}: {key.comment}" in str(minigen.Config.__doc__)
        assert f"{name} = {key.default!r}: {key.comment}" in str(type(table).__doc__)


def test_every_option_of_a_policy_is_explained_where_help_shows_it() -> None:
    for name, option in OPTIONS.items():
        assert f"{name} = {DEFAULTS[name]!r}: {option.help}" in str(minigen.Policy.__doc__)


# ── In a notebook ────────────────────────────────────────────────────────────────────────────────


def test_a_bar_shows_how_far_training_is(capsys: pytest.CaptureFixture[str]) -> None:
    records = tiny().train(progress=True)
    assert "6/6" in capsys.readouterr().err
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_done_says_so_when_it_is_trained_on() -> None:
    run = tiny()
    run.train()
    with pytest.warns(UserWarning, match="nothing left to train: all 6 steps"):
        assert run.train() == []
    with pytest.raises(minigen.OptionError, match=r"^all 6 steps of .* are done; raise"):
        run.train(1)


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


SCRIPT = ROOT / "docs/examples/library.py"


def test_a_script_of_forty_lines_does_all_that_the_commands_do(tmp_path: Path) -> None:
    code = [line for line in SCRIPT.read_text().splitlines() if line and line[0] != "#"]
    assert len(code) <= 40
    imported = [
        node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Import)
    ]
    assert [alias.name for node in imported for alias in node.names] == ["minigen"]
    done = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sampling: True, since" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "mine.safetensors"}


def test_a_strict_type_checker_accepts_a_right_script_and_finds_each_fault(tmp_path: Path) -> None:
    faulty = USER + "".join(f"{line}\n" for line in FAULTS)
    (tmp_path / "faulty.py").write_text(faulty)
    (tmp_path / "library.py").write_text(SCRIPT.read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-error-summary"]
    command += [f"--cache-dir={ROOT / '.mypy_cache'}", "faulty.py", "library.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    first = USER.count("\n") + 1
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert all(line.startswith("faulty.py:") for line in found)
    codes = {int(line.split(":")[1]) - first: line.rpartition("[")[2][:-1] for line in found}
    assert codes == dict(enumerate(FAULTS.values())), done.stdout + done.stderr
