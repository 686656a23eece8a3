"""The package's front: what is shown, what is typed, and what a misspelt name is told."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import minigen
from docs import api
from minigen.decoding.policy import OPTIONS
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
    assert repr(minigen.RunFolder("runs/mine", run)).startswith("RunFolder('runs/mine', Run(step 1")
    assert repr(run.tokenizer) == "ByteTokenizer(257 tokens, 0 of them merges)"
    assert repr(minigen.Policy(top_k=3, temperature=0)) == "Policy(temperature=0.0, top_k=3)"
    assert repr(minigen.Policy()) == "Policy()"


def test_the_page_about_the_library_is_made_of_its_docstrings() -> None:
    made = api.page()
    assert api.PAGE.read_text(encoding="utf-8") == made, "to make it anew: make docs"
    assert api.public_names().keys() == set(minigen.__all__)
    assert all(f"\n## minigen.{name}" in made for name in minigen.__all__)


class Model(NamedTuple):
    run: minigen.Run
    generator: minigen.Generator


@pytest.fixture(scope="module")
def tiny_model() -> Model:
    run = tiny()
    return Model(run, run.generator)


L = [0.1, 0.2, 0.3]
WRONG: dict[str, tuple[Callable[[Any], object], str]] = {  # takes Any, so that it may be wrong
    "a config by number": (lambda m: minigen.Config.load(5), "must be a str or a Path (got 5)"),
    "overrides as text": (
        lambda m: minigen.Config.load(overrides="training.steps=3"),
        "overrides must be a dict or None (got 'training.steps=3')",
    ),
    "a key by number": (
        lambda m: minigen.Config.load(overrides={5: 3}),
        "unknown key 5",
    ),
    "a table misspelt": (
        lambda m: minigen.Config.load(overrides={"trainig.steps": 3}),
        "unknown table 'trainig': the nearest known one is [training]",
    ),
    "a config that is written": (lambda m: m.run.config.__init__(steps=3), "a config is read"),
    "a config that is changed": (
        lambda m: setattr(m.run.config.training, "steps", 3),
        "a config is frozen (got steps = 3): config.override",
    ),
    "a run of a name": (
        lambda m: minigen.Run("fables"),
        "config must be a Config, as Config.load(\"fables\") gives (got 'fables')",
    ),
    "a text as a number": (
        lambda m: minigen.Run(m.run.config, text=5),
        "text must be a str, bytes, a list of str or bytes or None (got 5)",
    ),
    "a text misspelt": (lambda m: minigen.Run(m.run.config, txt="x"), "nearest known one is text"),
    "no workers": (lambda m: minigen.Run(m.run.config, workers=2), "communicator of mpi4py"),
    "steps in words": (lambda m: m.run.train("5"), "must be a whole number or None (got '5')"),
    "half a step": (lambda m: m.run.train(2.5), "must be a whole number or None (got 2.5)"),
    "a step too many": (lambda m: m.run.train(7), "from 0 to the 6 left"),
    "a bar as text": (lambda m: m.run.train(0, progress="no"), "must be True or False (got 'no')"),
    "a model by number": (lambda m: minigen.load(5), "model must be a str or a Path (got 5)"),
    "a model misspelt": (
        lambda m: minigen.load("x", polciy=1),
        "unknown option 'polciy': the nearest known one is model",
    ),
    "a prompt of numbers": (
        lambda m: m.generator.generate([1, 2]),
        "prompt must be a str, bytes or a list of str or bytes (got [1, 2])",
    ),
    "prompts that are one": (lambda m: m.generator.pieces("a"), "must be a list of str or bytes"),
    "an argument misspelt": (lambda m: m.generator.beams("x", num_beam=1), "is num_beams"),
    "an option of a policy misspelt": (lambda m: minigen.Policy(temprature=1), "is temperature"),
    "a policy as a dict": (
        lambda m: m.generator.next("x", policy={"top_k": 1}),
        "policy must be a Policy or None (got {'top_k': 1})",
    ),
    "a draft by name": (lambda m: m.generator.generate("x", draft="d"), "must be a Generator"),
    "a path for paths": (lambda m: m.generator.evaluate(paths="x"), "a list of str or Path"),
    "no text": (lambda m: m.generator.score(None), "text must be a str or bytes (got None)"),
    "logits in words": (lambda m: minigen.head.softmax(["a"]), "z must be numbers (got ['a'])"),
    "ragged logits": (lambda m: minigen.Policy().choose([L, L[1:]]), "logits must be numbers"),
    "logits of several tokens": (lambda m: minigen.Policy().choose([L, L]), "(V,) (got (2, 3))"),
    "a word in halves": (lambda m: minigen.Policy().choose(L, word=0.5), "a whole number"),
    "a history in halves": (
        lambda m: minigen.Policy().probabilities(L, np.array([0.5])),
        "history must be a list of whole numbers (got array([0.5]))",
    ),
    "a history of one number": (
        lambda m: minigen.Policy().probabilities(L, np.array(2)),
        "history must be a list of whole numbers (got array(2))",
    ),
    "a table of numbers": (
        lambda m: minigen.Policy(top_k=np.zeros((2, 2))),
        "got array([[0., 0.], [0., 0.]])",
    ),
    "a stream of a name": (lambda m: minigen.Stream("a", "b"), "seed must be a whole number"),
    "a stream by number": (lambda m: minigen.Stream(0, 1), "name must be a str (got 1)"),
    "fewer than no words": (
        lambda m: minigen.Stream(0, "a").words(-1),
        "n must be a whole number of at",
    ),
    "a text by number": (lambda m: minigen.ByteTokenizer().encode(5), "must be a str or bytes"),
    "merges of one": (lambda m: minigen.ByteTokenizer([(1,)]), "must be a list of pairs"),
    "ids in words": (lambda m: minigen.ByteTokenizer().decode("ab"), "ids must be numbers"),
    "a proof of a name": (lambda m: minigen.prove("fables"), "config must be a Config"),
    "a sweep of a name": (lambda m: minigen.sweep("x", {}, out="x"), "config must be a Config"),
    "a sweep over one value": (
        lambda m: minigen.sweep(m.run.config, {"run.seed": 1}, out="x"),
        "values must be a dict of lists (got {'run.seed': 1})",
    ),
    "a folder of no run": (lambda m: minigen.RunFolder.create("x", None), "must be a Run, as Run"),
    "a report as bytes": (lambda m: minigen.write_report(b"x"), "must be a str or a Path"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_argument_gets_one_line(tiny_model: Model, mistake: str) -> None:
    call, message = WRONG[mistake]
    with pytest.raises(minigen.OptionError) as caught:
        call(tiny_model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_and_texts_of_numpy_are_taken_as_such(tiny_model: Model) -> None:
    plain = tiny_model.generator.generate("ab", max_new_tokens=3, seed=1, temperature=0.5)
    assert plain == tiny_model.generator.generate(
        np.str_("ab"),
        max_new_tokens=np.int64(3),
        seed=np.uint8(1),
        temperature=np.float32(0.5),
    )
    policy = minigen.Policy(repetition_penalty=2.0)
    history = np.array([0, 2])
    assert policy.choose(np.array(L), history) == policy.choose(L, [0, 2])


def test_every_config_key_is_explained_where_help_shows_it() -> None:
    for name, key in KEYS.items():
        table = getattr(minigen.Config.load(), name.partition(".")[0])
        assert f"{name} = {key.default!r}: {key.comment}" in str(minigen.Config.__doc__)
        assert f"{name} = {key.default!r}: {key.comment}" in str(type(table).__doc__)


def test_every_option_of_a_policy_is_explained_where_help_shows_it() -> None:
    for name, option in OPTIONS.items():
        assert f"{name} = {option.default!r}: {option.help}" in str(minigen.Policy.__doc__)


# ── In a notebook ────────────────────────────────────────────────────────────────────────────────


def test_a_bar_shows_how_far_training_is(capsys: pytest.CaptureFixture[str]) -> None:
    records = tiny().train(progress=True)
    assert "6/6" in capsys.readouterr().err
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]


def test_records_and_candidates_make_a_table_as_they_are() -> None:
    """pandas.DataFrame takes a list of dataclasses: a row for each, a column for each field."""
    run = tiny()
    rows = {"step": run.train(2), "token_id": run.generator.next("a").candidates}
    for first, table in rows.items():
        assert all(is_dataclass(row) for row in table)
        assert next(iter(asdict(table[0]))) == first
    assert [asdict(record)["loss"] for record in rows["step"]] == [r.loss for r in rows["step"]]


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
