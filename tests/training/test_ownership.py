"""One process at a time writes to a run folder."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from minigen import MinigenError, verify
from minigen.training import checkpoint
from minigen.training.config import Config
from minigen.training.folder import RunFolder
from minigen.training.logs import read_lines
from minigen.training.run import Run
from minigen.training.sweep import create, mend
from tests.conftest import PATIENCE, TINY, TINY_SETTINGS

pytest.importorskip("fcntl", reason="locks are POSIX's")
LONG = ["train", *TINY_SETTINGS, "--set", "training.steps=100000", "--out", "run"]
RESUME = ["train", "--resume", "--out", "run"]


started: list[subprocess.Popen[bytes]] = []


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "minigen", *arguments]
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return started[-1]


@contextmanager
def owned_by_another(path: str) -> Iterator[None]:
    hold = "import sys; from pathlib import Path; from minigen.files import own\n"
    hold += f"kept = own(Path({path!r})); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.communicate(b"")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield
    while started:  # none outlives a test that failed
        process = started.pop()
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_and_told_who_has_the_folder() -> None:
    first = start(*LONG)
    assert first.stderr
    first.stderr.readline()
    second = start(*RESUME)
    err = second.communicate(timeout=PATIENCE)[1].decode()
    holder = f"process {first.pid}" if sys.platform == "linux" else "another process"
    assert (second.returncode, err.count("\n")) == (1, 1)
    assert err.startswith(f"Error: run is being written to by {holder}: wait for its end")
    first.kill()  # the lock dies with it
    first.communicate()
    third = start(*RESUME)
    assert third.stderr
    third.stderr.readline()
    third.terminate()
    third.communicate(timeout=PATIENCE)
    assert third.returncode == 130


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_of_two_that_start_at_once_one_is_refused_and_nothing_is_mixed(times: int) -> None:
    for number in range(times):
        short = ["train", *TINY_SETTINGS, "--out", f"run-{number}"]
        both = [start(*short), start(*short)]
        for process in both:
            process.communicate(timeout=PATIENCE)
        assert sorted(process.returncode for process in both) == [0, 1]
        lines = read_lines(Path(f"run-{number}/metrics.jsonl"))
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "command",
    [
        ["train", *TINY_SETTINGS],
        ["train", "--resume"],
        ["demo", *TINY_SETTINGS],
        ["sweep", *TINY_SETTINGS],
        ["sweep", "--resume"],
    ],
    ids=lambda command: " ".join(part for part in command if "=" not in part and part != "--set"),
)
def test_every_command_that_writes_to_a_folder_must_own_it(command: list[str]) -> None:
    held = Path("run")
    if "--resume" in command:
        if command[0] == "train":
            RunFolder.create(held, Run(Config.load("fables", TINY)))
        else:
            create(held, {"seed=0": Config.load("fables", TINY)})
    held.mkdir(exist_ok=True)
    with owned_by_another("run"):
        before = sorted(held.rglob("*"))
        process = start(*command, "--out", "run")
        err = process.communicate(timeout=PATIENCE)[1].decode()
        assert sorted(held.rglob("*")) == before
    assert (process.returncode, err.count("\n")) == (1, 1)
    assert err.startswith("Error: run is being written to by ")


def test_a_sweep_mends_no_run_that_another_process_trains() -> None:
    config = Config.load("fables", TINY)
    create(Path("run"), {"seed=0": config})
    for _ in RunFolder.resume("run/seed=0", config).steps():
        pass
    gc.collect()
    Path("run/seed=0/metrics.jsonl").write_bytes(b"")  # which the other one has begun anew
    before = {path.name: path.stat() for path in Path("run/seed=0").iterdir()}
    with owned_by_another("run/seed=0"):
        with pytest.raises(MinigenError, match=r"^run/seed=0 is being written to by "):
            mend(Path("run/seed=0"), config)
        assert {path.name: path.stat() for path in Path("run/seed=0").iterdir()} == before
    assert "metrics.jsonl has lost" in mend(Path("run/seed=0"), config)


def test_a_folder_is_made_with_those_above_it_or_taken_where_it_is_empty() -> None:
    run = Run(Config.load("fables", TINY))
    Path("empty").mkdir()
    for path in ("above/below", "empty"):
        RunFolder.create(path, run)
        with pytest.raises(MinigenError) as caught:
            RunFolder.create(path, run)
        assert str(caught.value) == (
            f"{path} is not a new or empty folder: name another with --out, or go on with minigen "
            f"train --resume --out {path}"
        )


def test_a_folder_is_owned_as_long_as_it_is_kept_whichever_way_it_was_taken() -> None:
    config = Config.load("fables", TINY)
    open_once_more = "from minigen.files import own; from pathlib import Path; own(Path('run'))"
    takes = [lambda: RunFolder.create("run", Run(config)), lambda: RunFolder.resume("run", config)]
    for take in takes:
        folder = take()
        gc.collect()
        for is_kept in (True, False):
            if not is_kept:
                del folder
                gc.collect()
            other = subprocess.run([sys.executable, "-c", open_once_more], capture_output=True)
            assert (b"run is being written to by" in other.stderr) == is_kept


def test_a_process_may_take_its_own_folder_again_and_only_the_last_to_do_so_writes_to_it() -> None:
    folder = RunFolder.create(Path("run"), Run(Config.load("fables", TINY)))
    config = folder.run.config
    steps = folder.steps()
    assert [next(steps).step, next(steps).step] == [1, 2]
    with pytest.raises(MinigenError, match="learning_rate cannot change in a run that goes on"):
        RunFolder.resume("run", config.override({"optimizer.learning_rate": 0.5}))
    assert next(steps).step == 3  # nothing was taken
    again = RunFolder.resume("run", config)
    assert again.run.step == 0
    assert [record.step for record in again.steps()] == [1, 2, 3, 4, 5, 6]
    for write in (lambda: next(steps), folder.save):
        with pytest.raises(MinigenError, match=r"^run was opened again in this process: go on"):
            write()
    assert [line["step"] for line in read_lines(Path("run/metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]


def test_a_folder_stays_where_it_is_whatever_folder_the_process_works_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create("run", Run(Config.load("fables", TINY)))
    (tmp_path / "elsewhere/run").mkdir(parents=True)  # of the same name, and somebody else's
    monkeypatch.chdir("elsewhere")
    assert [record.step for record in folder.steps()] == [1, 2, 3, 4, 5, 6]
    assert list(Path("run").iterdir()) == []
    assert checkpoint.load(tmp_path / "run/step-000006.safetensors").step == 6


def test_nothing_is_written_to_a_folder_that_took_the_place_of_the_run_s_own() -> None:
    folder = RunFolder.create("run", Run(Config.load("fables", TINY)))
    steps = folder.steps()
    next(steps)
    Path("run").rename("moved")
    Path("run").mkdir()
    moved = sorted((path, path.read_bytes()) for path in Path("moved").iterdir())
    for write in (lambda: next(steps), folder.save):
        with pytest.raises(MinigenError) as caught:
            write()
        assert str(caught.value) == (
            "run is another folder now than the one that this run was written to: nothing more is "
            "written to it"
        )
    assert list(Path("run").iterdir()) == []
    Path("run").rmdir()
    with pytest.raises(MinigenError) as caught:
        list(folder.steps())
    gone = f"cannot read folder {Path('run').absolute()}: No such file or directory"
    assert str(caught.value) == gone  # and no word of a checkpoint that is intact
    assert sorted((path, path.read_bytes()) for path in Path("moved").iterdir()) == moved


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks processes")
def test_a_forked_process_owns_no_folder_and_keeps_none_locked() -> None:
    config = Config.load("fables", TINY)
    folder = RunFolder.create("run", Run(config))
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of the threads that a child has not
        child = os.fork()
    if not child:
        for use in (folder.save, lambda: RunFolder.resume("run", config)):
            try:
                use()
            except MinigenError as error:
                os.write(write, f"{error}\n".encode())
        os.close(write)
        time.sleep(PATIENCE)  # and lives on
        os._exit(0)
    try:
        os.close(write)
        with open(read) as told:
            lines = told.read().splitlines()
        assert len(lines) == 2
        assert all("run is being written to by" in line for line in lines)
        assert [record.step for record in folder.steps()] == [1, 2, 3, 4, 5, 6]
        del folder
        gc.collect()
        open_once_more = "from minigen.files import own; from pathlib import Path; own(Path('run'))"
        assert subprocess.run([sys.executable, "-c", open_once_more]).returncode == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_threads_that_train_and_save_in_one_folder_leave_what_one_thread_would() -> None:
    config = Config.load("fables", TINY | {"training.steps": 60, "checkpoint.every": 7})
    alone, folder = (RunFolder.create(name, Run(config)) for name in ("alone", "run"))
    list(alone.steps())
    start = threading.Barrier(3)

    def work(number: int) -> int:
        start.wait()
        if number:
            return len([*islice(folder.steps(), 30)])
        while folder.run.step < 60:
            folder.save()
        return 0

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert [*threads.map(work, range(3))] == [0, 30, 30]
    finally:
        sys.setswitchinterval(interval)
    for name in ("metrics.jsonl", "samples.jsonl", *(p.name for p in Path("alone").glob("step*"))):
        assert Path("run", name).read_bytes() == Path("alone", name).read_bytes()
    assert verify("run") == []
