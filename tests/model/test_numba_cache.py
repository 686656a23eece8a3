"""Numba's cache on disk saves time, and can do no harm."""

import gc
import importlib.util
import os
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minigen.exact import arithmetic
from minigen.model import head, rules
from minigen.model.rules import OPTIMIZERS

numba = pytest.importorskip("numba")
numba_cache = pytest.importorskip("minigen.model.numba_cache")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that numba is told to cache in."""
    # The next compilation would do so, and forget the folder, if a variable of numba's has changed.
    numba.config.reload_config()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "loop.py").write_text("def double(x):\n    return x + x\n")
    monkeypatch.setitem(sys.modules, "loop", None)  # and out again at the end
    return tmp_path / "cache"


def compiled(folder: Path) -> Any:
    """Return the function of loop.py as a new process would have it, after a call."""
    gc.collect()  # of what was compiled before: numba would find it in memory
    spec = importlib.util.spec_from_file_location("loop", folder.parent / "loop.py")
    assert spec
    assert spec.loader
    module = sys.modules["loop"] = importlib.util.module_from_spec(spec)  # numba looks for it there
    spec.loader.exec_module(module)
    function = numba.njit(module.double)
    numba_cache.enable(function)
    assert function(21) == 42
    return function


def hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "sealed otherwise": lambda data: data[:-1] + bytes([data[-1] ^ 1]),  # machine code could be run
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [*product(["nbi", "nbc"], ["empty", "cut", "flipped"]), ("nbc", "sealed otherwise")],
)
def test_what_is_damaged_is_compiled_anew_and_mended(folder: Path, kind: str, damage: str) -> None:
    assert hits(compiled(folder)) == 0
    assert hits(compiled(folder)) == 1
    (file,) = folder.rglob(f"*.{kind}")
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert hits(compiled(folder)) == 0  # what it holds is not run, even where it could be
    assert hits(compiled(folder)) == 1


def test_that_loops_are_compiled_is_said_once_and_not_where_the_cache_has_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="minigen")
    numba_cache._announce.cache_clear()
    compiled(folder)
    assert caplog.messages == ["compiling the training loops, which takes some seconds"]
    numba_cache._announce.cache_clear()
    compiled(folder)
    assert len(caplog.messages) == 1


def test_without_room_it_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for _ in range(2):
        assert hits(compiled(folder)) == 0


def test_without_a_home_no_folder_is_called_tilde(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="minigen")
    numba_cache._announce.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "")
    for named in ("", "~/cache"):
        monkeypatch.setattr(numba.config, "CACHE_DIR", named)
        assert hits(compiled(folder)) == 0
    assert not [entry.name for entry in tmp_path.iterdir() if "~" in entry.name]
    assert len(caplog.messages) == 1  # that it compiles


def test_a_tilde_in_its_name_is_home(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "~/cache")
    compiled(folder)
    assert list((tmp_path / "home").rglob("*.nbc"))


@pytest.mark.parametrize("module", [arithmetic, head, rules], ids=lambda module: module.__name__)
def test_a_change_of_a_formula_gives_every_loop_another_name_in_the_cache(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loops()
    changed = SimpleNamespace(get_data=lambda path: Path(path).read_bytes() + b"# changed")
    monkeypatch.setattr(module, "__loader__", changed)
    after = loops()
    assert before.keys() == after.keys() > {"scatter", "adamw", "sgd"}
    assert all(after[name] != key for name, key in before.items())


def loops() -> dict[str, str]:
    """What each compiled loop is called in the cache, as a new process would call it."""
    file = importlib.util.find_spec("minigen.model.kernels_numba")
    assert file
    assert file.loader
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    compiled = [loop for loop in vars(module).values() if hasattr(loop, "py_func")]
    compiled += [module._elementwise_loop(rule.formula, 4, 3) for rule in OPTIMIZERS.values()]
    return {
        loop.py_func.__name__: loop.py_func.__qualname__
        for loop in compiled
        if isinstance(loop._cache, numba_cache._Cache)
    }
