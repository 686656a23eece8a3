"""Questions to the twin under Node; floats travel by their bits."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NODE = shutil.which("node")
TWIN = Path(__file__).parents[2] / "minigen" / "report" / "twin.js"
DRIVER = Path(__file__).parent / "twin_driver.js"

needs_node = pytest.mark.skipif(NODE is None, reason="needs node: install Node.js")


def ask(kind: str, **question: Any) -> Any:
    """Return the twin's answer to one question of ``twin_driver.js``."""
    assert NODE
    questions = json.dumps([{"kind": kind, **question}])
    done = subprocess.run(
        [NODE, str(DRIVER)], input=questions.encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)[0]


def node(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run ``node twin.js`` with the given arguments."""
    assert NODE
    command = [NODE, str(TWIN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def coded(numbers: Any) -> str:
    """Floats as base64 of their little-endian bytes."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).decode()


def floats(text: str) -> Any:
    """Return what ``coded`` was given, as a flat array."""
    return np.frombuffer(base64.b64decode(text), "<f8")
