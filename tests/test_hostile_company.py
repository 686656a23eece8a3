"""The bits stay in hostile company: whatever else a process does or is made to do beside a run.

Each process trains the same tiny run in several ways and prints what came of each; one plain run,
in the process of this test, says what it must be.
"""

import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minigen
from tests import hostile_ways

PACKAGE = Path(minigen.__file__).parent


def start(*ways, options=(), **variables):
    """Train in a process of its own; return what each way gave."""
    done = subprocess.run(
        [sys.executable, *options, hostile_ways.__file__, *ways],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def expected():
    return hostile_ways.plain()


@pytest.mark.parametrize("way", ["raising", "in_thread", "interleaved"])
def test_floating_point_errors_threads_and_other_runs_change_nothing(expected, way):
    assert getattr(hostile_ways, way)() == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_trains_the_same(expected):
    assert start("plain", "in_fork") == [expected] * 2


@pytest.mark.slow
def test_small_stacks_change_nothing(expected, tmp_path):
    """The loops are compiled there, too: nothing is in numba's cache."""
    assert start("in_small_stack", "plain", NUMBA_CACHE_DIR=str(tmp_path)) == [expected] * 2


COMPANY = [  # options of Python, locale, time zone, hash seed
    ("-X dev -W error", "tr_TR.UTF-8", "Asia/Kathmandu", "1"),
    pytest.param("-O", "C", "Pacific/Chatham", "4294967295", marks=pytest.mark.slow),
    pytest.param("-OO", "de_DE.ISO-8859-1", "", "0", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "locale", "zone", "seed"), COMPANY)
def test_modes_of_python_locales_time_zones_and_hash_seeds_change_nothing(
    expected, options, locale, zone, seed
):
    variables = {"LC_ALL": locale, "TZ": zone, "PYTHONHASHSEED": seed, "PYTHONUTF8": "0"}
    assert start("plain", "raising", options=options.split(), **variables) == [expected] * 2


@pytest.mark.slow
def test_an_installation_of_compiled_files_alone_changes_nothing(expected, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "minigen", ignore=shutil.ignore_patterns("__pycache__"))
    configs = PACKAGE.parent / "configs"
    if configs.is_dir():  # of a checkout
        shutil.copytree(configs, tmp_path / "minigen" / "configs")
    assert compileall.compile_dir(tmp_path / "minigen", quiet=1, legacy=True)
    for source in (tmp_path / "minigen").rglob("*.py"):
        source.unlink()
    found = start("plain", PYTHONPATH=str(tmp_path))
    assert found == [expected]
    assert not list((tmp_path / "minigen").rglob("*.py"))
