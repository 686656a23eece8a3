"""The lesson as a notebook: made of the lesson, and its cells give what they show."""

import ast
import contextlib
import io
import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from docs.notebook import LESSON, NOTEBOOK, notebook
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


def test_every_block_of_the_lesson_can_be_typed_into_pythons_prompt() -> None:
    """A compound statement ends with a line of its own, for which the prompt waits."""
    lines = LESSON.read_text(encoding="utf-8").splitlines()
    for line, following in pairwise(lines):
        if line.startswith("...    "):
            assert following.startswith("..."), f"after {line!r} the prompt waits for a line"
