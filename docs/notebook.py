"""Make docs/output-head.ipynb of the lesson: its text, its blocks as cells, its outputs as theirs.

`make docs` runs it: `python -m docs.notebook`. A test holds the notebook to the lesson and runs it.
"""

import doctest
import hashlib
import json
import re
from pathlib import Path
from typing import Any

LESSON = Path(__file__).with_name("output-head.md")
NOTEBOOK = LESSON.with_suffix(".ipynb")

START = """\
# What the lesson writes goes to a new folder, which holds links to the files that it reads.
import os, sys, tempfile
from pathlib import Path
above = (Path.cwd(), *Path.cwd().parents)
checkout = next(folder for folder in above if (folder / "checkpoints").is_dir())
os.chdir(tempfile.mkdtemp(prefix="minigen-lesson-"))
for name in ("checkpoints", "docs"):
    os.symlink(checkout / name, name)
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])"""

_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*\n)", re.MULTILINE)


def _cell(kind: str, source: str, output: str = "") -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.strip("\n")}
    if kind == "code":
        stream = {"output_type": "stream", "name": "stdout", "text": output}
        cell |= {"execution_count": None, "outputs": [stream] if output else []}
    return cell


def _code_cells(language: str, block: str) -> list[dict[str, Any]]:
    """Cut a block into cells: each command, and each run of statements that ends in an output."""
    if language == "console":
        parts = _COMMAND.split(block)
        pairs = zip(parts[1::2], parts[2::2], strict=True)
        return [_cell("code", f"%%bash\n{command}", output) for command, output in pairs]
    cells, source = [], ""
    for example in doctest.DocTestParser().get_examples(block):
        source += example.source
        if example.want:
            cells.append(_cell("code", source, example.want.replace("<BLANKLINE>", "")))
            source = ""
    return [*cells, _cell("code", source)] if source else cells


def notebook(lesson: str) -> str:
    """Return the notebook of a lesson, as JSON."""
    cells, end = [_cell("code", START)], 0
    for match in _BLOCK.finditer(lesson):
        cells.append(_cell("markdown", lesson[end : match.start()]))
        cells += _code_cells(*match.groups())
        end = match.end()
    cells.append(_cell("markdown", lesson[end:]))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):  # the same lesson gives the same bytes
        cell["id"] = hashlib.sha256(f"{number}:{cell['source']}".encode()).hexdigest()[:12]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(LESSON.read_text(encoding="utf-8")), encoding="utf-8")
