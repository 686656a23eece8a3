"""Workers: any number of processes gives the same bits, and a fault of one is told once."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minigen import Config, Run, cli
from minigen.errors import MinigenError, OptionError
from minigen.model import parallel
from minigen.training import checkpoint
from minigen.training.folder import RunFolder
from minigen.training.pool import helpers, pool
from minigen.training.workers import Workers, from_mpiexec, join
from tests.conftest import PATIENCE, TINY, TINY_SETTINGS

MPIEXEC = shutil.which(
    "mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
REPOSITORY = Path(__file__).parents[2]

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None,
    reason="needs mpiexec: pip install 'minigen[mpi]', or an MPI and mpi4py",
)


def mpiexec(
    count: int, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENT…` in so many processes."""
    assert MPIEXEC
    return subprocess.run(
        [MPIEXEC, "-n", str(count), sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1", **environment},
    )


def job(count: int, *arguments: str, cwd: Path | None = None) -> Any:
    """Run a job of workers_job.py and return what its first worker printed."""
    done = mpiexec(count, "-m", "tests.training.workers_job", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(folder: Path) -> dict[str, bytes]:
    """Return a run folder's files, without the wall-clock figures."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != "timing.jsonl" and path.is_file()
    }


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that minigen itself, and not mpiexec, printed as errors."""
    return [line for line in done.stderr.splitlines() if line.startswith("Error: ")]


# ---- One process


def test_one_process_is_the_trivial_case():
    alone = join()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.share(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert alone.each(lambda: 3) == alone.from_first(lambda: 3) == alone.total(lambda: 3, 9) == 3
    assert alone.step(1, lambda: 3) == 3
    alone.agree({"colour": "red"})
    assert join(alone) is alone
    with pytest.raises(OptionError, match=r"^workers must be a communicator of mpi4py \(got 3\)"):
        join(3)


def test_a_batch_is_shared_out_whole_and_evenly():
    one, shares = Workers(), []
    one.size = 3
    for one.rank in range(3):
        shares.append(one.share(np.arange(8)).tolist())
    assert shares == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_pool_shares_the_threads_out_and_gives_them_back(monkeypatch):
    allowed = parallel.resources()[0]
    monkeypatch.setattr("minigen.training.pool.cores", lambda: {*range(allowed)})
    with pool(Workers(), 2, joins=True):
        assert parallel.resources()[0] == max(1, allowed // 2)
    assert parallel.resources()[0] == allowed
    parallel.use_threads(allowed + 1)
    assert parallel.resources()[0] == allowed
    in_a_helper = "__import__('minigen.model.parallel').model.parallel.resources()[0]"
    with pool(Workers(), 2) as executor:
        assert executor.submit(eval, in_a_helper).result() == max(1, allowed // 2)


@pytest.mark.parametrize(
    ("cores", "tasks", "joins", "processes"),
    [(4, 9, None, 4), (4, 3, False, 3), (4, 3, True, 2), (4, 9, True, 3), (4, 1, True, 1)],
)
def test_a_pool_has_no_more_processes_than_there_are_cores_or_tasks(
    monkeypatch, cores, tasks, joins, processes
):
    monkeypatch.setattr("minigen.training.pool.cores", lambda: {*range(cores)})
    monkeypatch.setattr("minigen.training.pool.use_threads", lambda count: None)
    two = Workers()
    two.size = 2
    assert (helpers(Workers()), helpers(two)) == (cores - 1, 1)
    with pool(Workers(), tasks, **({} if joins is None else {"joins": joins})) as executor:
        assert executor._max_workers == processes


def test_a_pool_ends_its_own_processes_alone():
    other = get_context("spawn").Process(target=time.sleep, args=(60,))
    other.start()
    try:
        with pool(Workers(), 1) as executor:
            assert executor.submit(os.getpgrp).result() != os.getpgrp()  # not the terminal's
        other.join(0.2)
        assert active_children() == [other]
    finally:
        other.kill()
        other.join()


def test_a_pool_that_is_interrupted_ends_its_processes_and_does_not_wait_for_them():
    tasks = []

    def interrupted():
        with pool(Workers(), 1) as executor:
            executor.submit(os.getpid).result()
            tasks.append(executor.submit(time.sleep, PATIENCE))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(tasks[0].exception(), BrokenProcessPool)
    assert not active_children()


def test_a_second_interruption_does_not_wait_for_what_a_process_still_saves(tmp_path, monkeypatch):
    saving = (
        "import pathlib, time, minigen.signals as signals\n"
        "with signals.heard_by(signals.let_pass):\n"
        f"    pathlib.Path({str(tmp_path / 'saves')!r}).touch(); time.sleep({PATIENCE})"
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupted():
        with pool(Workers(), 1) as executor:
            tasks.append(executor.submit(exec, saving))
            while not (tmp_path / "saves").exists():
                time.sleep(0.01)

    tasks = []
    monkeypatch.setattr("minigen.training.pool.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(tasks[0].exception(), BrokenProcessPool)


def test_a_blas_that_was_loaded_later_is_held_at_the_same_number_of_threads():
    code = (
        "from minigen.model.parallel import resources; resources()\n"
        "import scipy.linalg\n"
        "from minigen.model.parallel import use_threads; use_threads(1)\n"
        "print(resources()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_train_imports_no_mpi(tmp_path):
    code = (
        "import sys; from minigen.cli import run; run(sys.argv[1:]); "
        "print([name for name in sys.modules if name.startswith('mpi4py')])"
    )
    command = [sys.executable, "-c", code, "train", *TINY_SETTINGS, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(
    params=["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def variable(request, monkeypatch):
    for name in list(os.environ):
        if name.endswith(("_SIZE", "_NUM_TASKS")):
            monkeypatch.delenv(name)
    return request.param


@pytest.mark.parametrize("size", ["1", "", "many", "-1", "4(x2)"])
def test_what_is_no_number_of_several_processes_trains_alone(variable, monkeypatch, size):
    monkeypatch.setenv(variable, size)
    assert type(from_mpiexec()) is Workers


def test_several_processes_without_mpi4py_are_told_to_install_it(variable, monkeypatch):
    monkeypatch.setenv(variable, "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MinigenError, match=r"^4 processes .*pip install 'minigen\[mpi\]'.*$"):
        from_mpiexec()


def test_what_mpi4py_warns_of_where_there_is_no_mpi_is_told_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    (tmp_path / "mpi4py.py").write_text(
        "import warnings; warnings.warn('where is it?'); raise RuntimeError('no libmpi.so')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    with pytest.raises(MinigenError, match=r"without mpi4py .*: no libmpi\.so$"):
        from_mpiexec()


def test_a_run_is_taken_up_by_the_workers_that_are_given(tmp_path):
    config = Config.load("fables", TINY)
    for steps in (0, 4):  # from the config alone, and from a checkpoint
        folder = RunFolder.create(tmp_path / str(steps), Run(config))
        records = folder.steps()
        for _ in range(steps):
            next(records)
        folder.latest.unlink() if not steps else None
        del folder, records
        workers = Workers()
        run = RunFolder.resume(tmp_path / str(steps), config, workers=workers).run
        assert (run.step, run.workers is workers) == (steps, True)


def test_a_run_lets_its_workers_compare_text_config_and_every_fingerprint():
    class Comparing(Workers):
        compared: dict[str, str] = {}  # noqa: RUF012

        def agree(self, values: Mapping[str, str]) -> None:
            self.compared |= values

    run = Run(Config.load("fables", TINY), workers=Comparing())
    prints = {
        f"fingerprint after step {record.step}": record.fingerprint
        for record in run.train()
        if record.fingerprint
    }
    assert len(prints) == 2
    assert prints.items() <= Comparing.compared.items()
    assert Comparing.compared["text (by its SHA-256)"] == run.corpus_sha256
    for name, table in run.config.portable().items():
        assert json.loads(Comparing.compared[f"[{name}] in their config"]) == table


@needs_mpi
def test_processes_that_another_mpiexec_started_do_not_train_side_by_side(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
    done = subprocess.run(
        [sys.executable, "-m", "minigen", "train", *TINY_SETTINGS, "--out", "run"],
        env=environment | {"OMPI_COMM_WORLD_SIZE": "2", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    told = (
        "Error: 2 processes were started, but MPI connects 1: use the mpiexec of the library that "
    )
    assert done.stderr.startswith(told)
    assert re.search(r"mpi4py loads \((MPICH Version|Open MPI v|Intel).*\)\n$", done.stderr)
    assert done.stderr.count("\n") == 1


# ---- The same bits

TEXT = "The fox ran after the hen. " * 20
CHANGES: list[dict[str, object]] = [
    {},
    {"training.micro_batches": 3, "run.seed": 1},
    {"training.batch_size": 3, "optimizer.name": "sgd"},  # fewer predictions than workers
    {"training.batch_size": 1, "training.micro_batches": 2, "training.steps": 3},
]


@pytest.fixture(scope="module")
def expected():
    results = []
    for change in CHANGES:
        run = Run(Config.load("fables", TINY | change), text=TEXT)
        records = run.train()
        texts = [record.sample.text for record in records if record.sample]
        positions = {name: stream.position for name, stream in run.streams.items()}
        lines = [record.metrics() for record in records]
        results.append([lines, texts, run.fingerprint, positions])
    return results


@needs_mpi
@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_number_of_workers_gives_the_same_losses_texts_and_weights(count, expected):
    results = job(count, "runs", TEXT, *map(json.dumps, CHANGES))
    assert len(results) in (len(CHANGES), 2 * len(CHANGES))  # numpy, and numba where it is
    for start in range(0, len(results), len(CHANGES)):
        assert results[start : start + len(CHANGES)] == expected


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Return what three workers exchanged, by the name of the exchange."""
    return job(3, "exchanges", cwd=tmp_path_factory.mktemp("three"))


@needs_mpi
def test_statistics_add_up_exactly_at_their_bounds(three):
    vector, loss, count, step_size = three["total"]
    assert vector == [3 * 2.0**51, -3.0]
    assert (loss, count, step_size) == (3 * 2**62 - 1 + 5, 8, 8)  # no float64, nor an int64


@needs_mpi
def test_workers_of_one_machine_share_its_threads(three):
    allowed, threads = three["threads"]
    assert threads == 3 * [max(1, allowed // 3)]


@needs_mpi
def test_all_workers_stop_where_one_was_asked_to(three):
    assert three["stops"] == [3 * [stops] for stops in (False, False, False, True, True, False)]


@needs_mpi
def test_the_first_worker_reads_and_the_first_of_a_machine_goes_ahead(three):
    found, done = three["turns"]
    assert found == [False, True, True]
    assert done == [0, 0, 0]


@needs_mpi
def test_of_workers_that_run_tasks_the_first_alone_is_interrupted(three):
    assert three["signals"] == [[0], [], []]


# ---- Faults


@needs_mpi
def test_what_goes_wrong_with_one_worker_is_told_to_all(three):
    told = three["errors"]
    assert all(len(set(texts)) == 1 for texts in told)
    one, all_of_them, third, first, colour, text, config = (texts[0] for texts in told)
    assert one == "worker 1 of 3: it broke"
    assert all_of_them == "it broke"
    assert third == "worker 2 of 3: it broke"
    assert first == "it broke"
    assert colour == (
        "all workers must have the same colour, and worker 2 of 3 has another than worker 0 "
        "(1, not 0)"
    )
    assert text.startswith(
        "all workers must have the same text (by its SHA-256), and worker 2 of 3"
    )
    assert config.startswith(
        "all workers must have the same [run] in their config, and worker 1 of"
    )


class Folders:
    """Commands under mpiexec in a folder that the first worker alone sees."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(
        self, count: int, trouble: str, *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        code = ["-m", "tests.training.workers_job", "command", trouble, *arguments]
        return mpiexec(count, *code, "--out", "run", cwd=self.path)

    @property
    def run(self) -> Path:
        return self.path / "run"


@pytest.fixture
def command(tmp_path):
    return Folders(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the files of a run that one process trained from end to end."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert cli.run(["train", "fables", *TINY_SETTINGS, "--out", str(path)]) == 0
    return files(path)


@needs_mpi
def test_one_worker_writes_the_files_that_one_process_writes_and_speaks_for_all(command, whole):
    done = command(3, "quiet0", "train", "fables", *TINY_SETTINGS)
    assert done.returncode == 0
    assert files(command.run) == whole
    assert list((command.path / "elsewhere").iterdir()) == []  # the others need no folder
    assert done.stdout.splitlines()[0] == "trained 6 steps: run/step-000006.safetensors"
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.count("step 6: validation loss") == 1


@needs_mpi
def test_a_worker_that_dies_ends_the_run_and_any_number_goes_on(command, whole):
    done = command(2, "killed1", "train", "fables", *TINY_SETTINGS)
    assert done.returncode != 0
    assert "Killed" in done.stdout  # mpiexec says so
    latest = checkpoint.locate(command.run)
    assert checkpoint.load(latest).step == 4
    done = command(3, "quiet0", "train", "--resume")
    assert done.returncode == 0, done.stderr
    assert files(command.run) == whole


@needs_mpi
def test_an_interruption_of_one_worker_stops_all_after_the_same_step_and_saves_once(
    command, whole, monkeypatch
):
    done = command(2, "asked1", "train", "fables", *TINY_SETTINGS)
    assert done.returncode == 130
    assert done.stderr.count("interrupted at step 5, saved run/step-000005.safetensors") == 1
    monkeypatch.chdir(command.path)
    assert cli.run(["train", "--resume", "--out", "run"]) == 0  # alone
    extra = files(command.run).keys() - whole.keys()
    assert extra == {"step-000005.safetensors"}
    assert {name: data for name, data in files(command.run).items() if name in whole} == whole


@needs_mpi
def test_a_worker_that_fails_alone_says_so_and_ends_the_others(command):
    done = command(2, "failed1", "train", "fables", *TINY_SETTINGS)
    assert done.returncode != 0
    assert errors(done) == ["Error: worker 1 of 2: no memory left"]


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--set", "optimizer.learning_rate=1e300"], 1, "training diverged at step "),
        (["--set", "training.batch_size=0"], 2, "training.batch_size must be "),
        (["--text", "-"], 2, "standard input reaches the first worker alone"),
    ],
)
def test_an_error_of_all_is_told_once(command, arguments, status, message):
    done = command(2, "quiet0", "train", "fables", *TINY_SETTINGS, *arguments)
    assert done.returncode == status
    assert len(errors(done)) == 1
    assert errors(done)[0].startswith(f"Error: {message}")


@pytest.mark.parametrize(("rank", "order"), [(0, "work wait wait"), (1, "wait work wait")])
def test_the_first_of_a_machine_goes_before_the_others(rank, order):
    """So that one of them alone reads a text and fills a cache, which the others find."""
    workers, done = Workers(), []
    workers._machine = SimpleNamespace(rank=rank, barrier=lambda: done.append("wait"))
    workers.each(lambda: done.append("work"))
    assert done == order.split()


def test_a_step_of_one_process_alone_may_be_interrupted_and_taken_again():
    def interrupt():
        raise KeyboardInterrupt

    workers = Workers()
    with pytest.raises(KeyboardInterrupt):
        workers.step(1, interrupt)
    assert workers.step(1, lambda: "taken") == "taken"
