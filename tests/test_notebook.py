"""The lesson as a notebook: made of the lesson, and its cells give what they show."""

import ast
import contextlib
import io
import json
import os
import signal
import tempfile
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from docs.notebook import LESSON, NOTEBOOK, notebook
from minigen.model.optimizer import Optimizer
from tests.conftest import TINY
from tests.test_documents import ROOT, matches, run_command


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does, the value of a last expression shown; return what it writes."""
    if source.startswith("%%bash\n"):
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80"}
        return run_command(source.partition("\n")[2], Path.cwd(), environment)[0]
    body = ast.parse(source).body
    last = [body.pop()] if isinstance(body[-1], ast.Expr) else []
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        exec(compile(ast.Interactive(last), "cell", "single"), names)
    return written.getvalue()


def test_the_notebook_is_what_is_made_of_the_lesson() -> None:
    made = notebook(LESSON.read_text(encoding="utf-8"))
    assert NOTEBOOK.read_text(encoding="utf-8") == made, "to make it anew: make docs"


def test_the_cells_of_the_notebook_give_what_they_show_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = (ROOT, ROOT / "docs", ROOT / "checkpoints")
    before = [sorted(os.listdir(folder)) for folder in folders]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            shown = "".join(output["text"] for output in cell["outputs"])
            output = run_cell(cell["source"], names)
            assert matches(shown, output), f"{cell['source']}\ngives\n{output}\nand not\n{shown}"
    assert [sorted(os.listdir(folder)) for folder in folders] == before


def test_a_cell_that_is_stopped_leaves_a_run_that_the_next_cell_trains_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the stop button does it: a signal, in the middle of a step."""
    update, calls = Optimizer.update, count(1)

    def stopped(self: Optimizer, *arguments: Any, **options: Any) -> float:
        rate = update(self, *arguments, **options)
        if next(calls) == 3:
            signal.default_int_handler(signal.SIGINT, None)
        return rate

    names: dict[str, Any] = {}
    made = f"run = minigen.Run(minigen.Config.load('fables', {TINY}))\n"
    undisturbed = run_cell(f"import minigen\n{made}run.train()\nrun.fingerprint", names)
    monkeypatch.setattr(Optimizer, "update", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_cell(f"{made}run.train(progress=True)", names)
    assert run_cell("run.step", names) == "2\n"
    assert run_cell("len(run.train(progress=True))", names) == "4\n"
    assert run_cell("run.fingerprint", names) == undisturbed


def test_every_block_of_the_lesson_can_be_typed_into_pythons_prompt() -> None:
    """A compound statement ends with a line of its own, for which the prompt waits."""
    lines = LESSON.read_text(encoding="utf-8").splitlines()
    for line, following in pairwise(lines):
        if line.startswith("...    "):
            assert following.startswith("..."), f"after {line!r} the prompt waits for a line"
