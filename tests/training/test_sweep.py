"""The sweep: what is asked for, runs as if started alone, going on, and the table."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from minigen import Config, MinigenError, cli
from minigen.cli import sweep as command
from minigen.errors import OptionError
from minigen.training import pool
from minigen.training import sweep as module
from minigen.training.sweep import (
    SEED,
    create,
    find,
    mend,
    parse_axes,
    parse_seeds,
    plan,
    split_values,
    sweep,
    table,
)
from tests.conftest import PATIENCE, TINY, TINY_SETTINGS, Result
from tests.training.test_workers import REPOSITORY, errors, files, mpiexec, needs_mpi

Command = Callable[..., Result]
RATES = ["--set", "optimizer.learning_rate=0.003,0.01"]
RATE, SEEDS = "optimizer.learning_rate", ["--seeds", "0:2"]
NAMES = {f"{RATE}={rate},seed={seed}" for rate in ("0.003", "0.01") for seed in (0, 1)}
BASE = Config.load("fables", TINY)


class Here(Executor):
    """Run each task in this process, at once."""

    def submit(self, task, /, *arguments):
        future = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(task(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.fixture
def here(monkeypatch):
    """Spare a test that is not about processes the time that they take to start."""

    @contextmanager
    def here(_workers, _tasks, **_):
        yield Here()

    monkeypatch.setattr(pool, "pool", here)


def folders(path: str) -> dict[str, dict[str, bytes]]:
    return {run.name: files(run) for run in runs_in(path)}


def runs_in(path: str | Path) -> list[Path]:
    return sorted(Path(path).glob("[!.]*"))


# ---- What is asked for


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.003", ["0.003"]),
        ("0.003,0.01, 0.03", ["0.003", "0.01", "0.03"]),
        ("adamw,sgd", ["adamw", "sgd"]),
        ("[0.9,0.99]", ["[0.9,0.99]"]),
        ("[0.9,0.99],[0.8, 0.9]", ["[0.9,0.99]", "[0.8, 0.9]"]),
        ('"Once, there",\'a, "b"\'', ['"Once, there"', "'a, \"b\"'"]),
        ('{"65" = 1.5, "66" = 2},{}', ['{"65" = 1.5, "66" = 2}', "{}"]),
        ('"a \\", b",c', ['"a \\", b"', "c"]),
        ("Don't,[no,more", ["Don't", "[no", "more"]),
        ("", [""]),
        (",", ["", ""]),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(text, values):
    assert split_values(text) == values


def test_values_are_toml_and_remember_how_they_were_written():
    assert parse_axes(["optimizer.betas=[0.9,0.99],[0.8,0.9]", "optimizer.name=sgd"]) == {
        "optimizer.betas": {"[0.9,0.99]": [0.9, 0.99], "[0.8,0.9]": [0.8, 0.9]},
        "optimizer.name": {"sgd": "sgd"},
    }


@pytest.mark.parametrize(("text", "seeds"), [("0:5", [0, 1, 2, 3, 4]), ("7", [7]), ("7:8", [7])])
def test_seeds_are_a_range_without_its_end(text, seeds):
    assert list(parse_seeds(text)) == seeds


def test_nothing_is_a_value_where_it_stands_alone():
    assert parse_axes(["sampling.prompt="]) == {"sampling.prompt": {"": ""}}


def test_a_sweep_has_at_most_ten_thousand_runs(monkeypatch):
    assert len(parse_seeds("5:10005")) == 10_000
    with pytest.raises(OptionError, match=r"at most 10000 runs \(got 10001\)"):
        parse_seeds("5:10006")
    monkeypatch.setattr(module, "MOST_RUNS", 4)
    axes = parse_axes([f"{RATE}=0.003,0.01"])
    assert len(plan(BASE, axes, range(2))) == 4
    with pytest.raises(OptionError, match=r"at most 4 runs \(got 6\)"):
        plan(BASE, axes, range(3))


def test_each_combination_of_values_meets_each_seed():
    runs = plan(BASE, parse_axes([f"{RATE}=0.003,0.01", "training.steps=2"]), range(2))
    assert runs.keys() == NAMES  # what does not vary is not in the name
    assert {config.training.steps for config in runs.values()} == {2}
    assert {(config.optimizer.learning_rate, config.run.seed) for config in runs.values()} == {
        (rate, seed) for rate in (0.003, 0.01) for seed in (0, 1)
    }


def test_names_of_folders_are_short_distinct_and_hold_no_slash():
    texts = ["a/b", "a?b", "x" * 300, "x" * 299 + "y"]
    runs = plan(BASE, {"sampling.prompt": {text: text for text in texts}}, range(1))
    assert len(runs) == 4
    assert all(len(name.encode()) < 200 and "/" not in name for name in runs)
    longest = "x" * 150
    assert module._folder_name(longest) == longest
    assert re.fullmatch(f"{longest}-[0-9a-f]{{8}}", module._folder_name(longest + "x"))
    assert re.fullmatch("a_b-[0-9a-f]{8}", module._folder_name("a/b"))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--seeds", "5:0"], "--seeds must be START:STOP"),
        (["--seeds", "0:"], "--seeds must be START:STOP"),
        (["--seeds", "-1"], "--seeds must be START:STOP"),
        (["--seeds", "0,1"], "--seeds must be START:STOP"),
        (["--seeds", "٣"], "--seeds must be START:STOP"),
        (["--seeds", "0:99999"], "at most 10000 runs (got 99999)"),
        (["--seeds", "0:9999999999999999999"], "(got 9999999999999999999)"),
        (["--set", "sampling.prompt=\udc80,a"], "sampling.prompt must be a string of Unicode"),
        (["--set", f"{RATE}=0.1,,0.2"], "a value before and after each comma"),
        (["--set", f"{RATE}=0.1,"], "a value before and after each comma"),
        (["--set", f"{RATE}=0.1,0.10,0.2"], f"{RATE} must have each value once"),
        (["--set", f"{RATE}=0.1,x"], f"{RATE} must be a finite number above 0 (got 'x')"),
        (["--set", "optimizer.betas=[0.9,0.99"], "optimizer.betas must be two numbers"),
        (["--set", "optimizer.rate=1,2"], "unknown key 'optimizer.rate'"),
        (["--set", RATE], "a setting must be KEY=VALUE"),
        (["--set", f"{RATE}=1", "--set", f"{RATE}=2"], f"{RATE} must be set once"),
        (["--set", "run.seed=1,2"], "seeds are set with --seeds"),
        (["--set", "run={seed=0}"], "as --seeds 0:5 (got values of run)"),
        (
            ["--set", "training={steps=1},{steps=2}", "--set", "training.steps=3"],
            "a key and its table may not both be set (got training, training.steps)",
        ),
        (["--text", "-"], "each run of a sweep reads its text"),
        (["--resume", "--seeds", "0:2"], "--resume takes all of it from the folder"),
    ],
)
def test_what_is_malformed_is_refused_before_anything_is_made(minigen: Command, arguments, rule):
    config = [] if "--resume" in arguments else ["fables"]
    result = minigen("sweep", *config, *arguments, "--out", "out")
    assert (result.status, result.out) == (2, "")
    assert rule in result.err
    assert result.err.rstrip().count("\n") == 0
    assert list(Path().iterdir()) == []


def test_all_that_a_sweep_goes_on_without_is_named(minigen: Command):
    options = ["fables", "--text", "x", "--set", "a", "--seeds", "0:1"]
    result = minigen("sweep", "--resume", *options, "--out", "out")
    assert (result.status, result.out, result.err) == (
        2,
        "",
        "Error: --resume takes all of it from the folder, so CONFIG, --text, --set, --seeds must "
        "go\n",
    )


def test_a_folder_that_is_taken_is_refused(minigen: Command):
    Path("out").mkdir()
    Path("out/other").touch()
    result = minigen("sweep", "fables", *TINY_SETTINGS, "--out", "out")
    assert result.status == 1
    assert [path.name for path in Path("out").iterdir()] == ["other"]


def test_what_holds_no_sweep_cannot_be_resumed(minigen: Command):
    result = minigen("sweep", "--resume", "--out", "out")
    assert result.status == 1
    assert result.err == "Error: out holds no sweep to resume: sweep without --resume\n"
    Path("out").touch()
    assert minigen("sweep", "--resume", "--out", "out") == result


# ---- What comes of it


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """Return the files of each run as `minigen train` writes them."""
    path = tmp_path_factory.mktemp("alone")
    for name in NAMES:
        rate, seed = (part.split("=")[1] for part in name.split(","))
        changes = ["--set", f"{RATE}={rate}", "--set", f"run.seed={seed}"]
        out = ["--out", str(path / name)]
        assert cli.run(["train", "fables", *TINY_SETTINGS, *changes, *out]) == 0
    return folders(str(path))


def test_processes_train_what_train_trains(minigen: Command, alone):
    result = minigen("sweep", "fables", *TINY_SETTINGS, *RATES, *SEEDS, "--out", "out")
    assert result.status == 0
    assert folders("out") == alone
    head, *rows = result.out.splitlines()
    loss = "0.0000 ± 0.0000"
    assert head == f"{RATE}  seeds  {'loss':{len(loss)}}  validation loss"
    for row, rate in zip(rows, ("0.003", "0.01"), strict=True):
        assert row.startswith(f"{rate:{len(RATE)}}  2      ")
        assert row.count(" ± ") == 2
        assert len(row) == len(head)


@needs_mpi
def test_workers_of_mpiexec_train_what_train_trains(tmp_path, alone):
    arguments = ["sweep", "fables", *TINY_SETTINGS, *RATES, *SEEDS, "--out", "out"]
    done = mpiexec(2, "-m", "minigen", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert folders(str(tmp_path / "out")) == alone
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr.count("training ") == len(alone)


@needs_mpi
def test_a_malformed_value_is_told_once_under_mpiexec(tmp_path):
    done = mpiexec(2, "-m", "minigen", "sweep", "--seeds", "x", cwd=tmp_path)
    assert (done.returncode, len(errors(done))) == (2, 1)


def test_resume_skips_what_is_done_and_goes_on_with_what_was_cut(minigen: Command, here, alone):
    settings = [*TINY_SETTINGS, *RATES, *SEEDS]
    assert minigen("sweep", "fables", *settings, "--out", "out").status == 0
    done, cut, begun, untouched = runs_in("out")
    (cut / "step-000006.safetensors").unlink()
    with open(cut / "metrics.jsonl", "ab") as log:
        log.write(b'{"step": 7, "lo')
    for folder in (begun, untouched):
        for path in folder.iterdir():
            if path.name != "config.toml" and (folder is untouched or "000000" not in path.name):
                path.unlink()
    before = (done / "step-000006.safetensors").stat().st_mtime_ns
    result = minigen("sweep", "--resume", "--out", "out")
    assert result.status == 0
    assert folders("out") == alone
    assert (done / "step-000006.safetensors").stat().st_mtime_ns == before
    again = minigen("sweep", "--resume", "--out", "out")
    assert again.err == "nothing left to do: all 4 runs are done\n"
    assert again.out == result.out


LOG_FAULT = "metrics.jsonl has lost, doubled or changed a line"


def damaged(folder: Path, how: str) -> None:
    last, metrics = folder / "step-000006.safetensors", folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    if how == "the run is deleted":
        shutil.rmtree(folder)
    elif how == "its config is deleted":
        (folder / "config.toml").unlink()
    elif how == "its config is empty":
        (folder / "config.toml").write_bytes(b"")
    elif how == "its last checkpoint is empty":
        last.write_bytes(b"")
    elif how == "its last checkpoint is of another step":
        shutil.copy(folder / "step-000000.safetensors", last)
    elif how == "its metrics are gone":
        metrics.unlink()
    elif how == "its metrics are no text":
        metrics.write_bytes(bytes(range(256)) * 9)
    elif how == "a line of NULs":
        lines[2] = bytes(len(lines[2]) - 1) + b"\n"
    elif how == "the last line is NULs":
        lines[-1] = bytes(len(lines[-1]) - 1) + b"\n"
    elif how == "a line is gone":
        del lines[3]
    elif how == "a line of its samples is gone":
        metrics = folder / "samples.jsonl"
        lines = metrics.read_bytes().splitlines(keepends=True)[:-1]
    elif how == "its metrics are a pipe":
        metrics.unlink()
        os.mkfifo(metrics)
    elif how.startswith("its config is a "):
        (folder / "config.toml").unlink()
        (folder / "config.toml").symlink_to("/dev/zero" if "device" in how else "nothing")
    if "line" in how:
        metrics.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("the run is deleted", "its folder is gone"),
        ("its config is deleted", "its config.toml is gone"),
        ("its config is empty", "config.toml is empty"),
        ("its last checkpoint is empty", "cannot load "),
        ("its last checkpoint is of another step", "is of step 0, whatever its name says"),
        ("its metrics are gone", LOG_FAULT),
        ("its metrics are no text", LOG_FAULT),
        ("a line of NULs", LOG_FAULT),
        ("the last line is NULs", LOG_FAULT),
        ("a line is gone", LOG_FAULT),
        ("a line of its samples is gone", LOG_FAULT.replace("metrics", "samples")),
        ("its metrics are a pipe", "metrics.jsonl must be a regular file"),
        ("its config is a device", "config.toml: it is not a regular file"),
        ("its config is a link to nothing", "config.toml: No such file"),
    ],
)
def test_a_damaged_run_is_named_and_trained_again_and_the_others_stay(
    how, fault, minigen: Command, here
):
    """Field report 55: and what was damaged is set aside, not thrown away."""
    settings = [*TINY_SETTINGS, *SEEDS, "--set", "optimizer.learning_rate=0.01"]
    undisturbed = minigen("sweep", "fables", *settings, "--out", "out")
    before = folders("out")
    bad, good = runs_in("out")
    time = (good / "step-000006.safetensors").stat().st_mtime_ns
    damaged(bad, how)
    result = minigen("sweep", "--resume", "--out", "out")
    assert (result.status, result.out) == (0, undisturbed.out)
    [said] = [line for line in result.err.splitlines() if bad.name in line and "again" in line]
    assert said.startswith(f"{bad.name}: ")
    assert fault in said
    assert said.count("vouches for") <= 1  # of all the checkpoints that no longer agree, one
    after = {
        run: {name: data for name, data in of.items() if not name.endswith(".aside")}
        for run, of in folders("out").items()
    }
    assert after == before
    assert (good / "step-000006.safetensors").stat().st_mtime_ns == time
    again = minigen("sweep", "--resume", "--out", "out")
    assert (again.out, again.err) == (result.out, "nothing left to do: all 2 runs are done\n")


def test_all_that_is_wrong_with_a_run_is_said(tmp_path):
    create(tmp_path, {"seed=0": BASE})
    run = tmp_path / "seed=0"
    (run / "config.toml").write_bytes(b"")
    (run / "metrics.jsonl").mkdir()
    config, log = mend(run, BASE).split("; ")
    assert config.startswith(f"{run}/config.toml is empty")
    assert log.startswith(f"{run}/metrics.jsonl must be a regular file")


def test_the_same_call_of_sweep_mends_a_run_and_adds_others(tmp_path):
    out = tmp_path / "out"
    values = {RATE: [0.01]}
    first = sweep(BASE, values, out=out, seeds=[0, 1])
    shutil.rmtree(out / "seed=1")
    told = "^seed=1: its folder is gone: it is trained again"
    with pytest.warns(UserWarning, match=told) as caught:
        again = sweep(BASE, values, out=out, seeds=[0, 1, 2])
    assert caught[0].filename == __file__  # the caller's line, which python shows
    assert again[:2] == first
    ends = [json.loads(line) for line in (out / "seed=0/metrics.jsonl").read_text().splitlines()]
    assert again[0] == {"folder": out / "seed=0", "run.seed": 0, RATE: 0.01, **ends[-1]}
    assert len(find(out)) == 3
    shutil.rmtree(out / "seed=2")
    assert len(find(out)) == 3


def test_a_folder_is_the_result_of_the_very_run_that_is_asked_for_and_of_no_other(tmp_path):
    sweep(BASE, {RATE: [0.01]}, out=tmp_path)
    for config, values, key in (
        (BASE, {RATE: [0.02]}, RATE),
        (BASE.override({"training.batch_size": 8}), {RATE: [0.01]}, "training.batch_size"),
    ):
        with pytest.raises(MinigenError, match=f"^{key} cannot change in a run that goes on"):
            sweep(config, values, out=tmp_path)
    text = tmp_path / "text"
    text.write_text("another text")
    with pytest.raises(MinigenError, match="the text is not the one"):
        sweep(BASE.override({"corpus.text": [str(text)], RATE: 0.01}), {}, out=tmp_path)
    [free] = sweep(BASE.override({"sampling.every": 1}), {RATE: [0.01]}, out=tmp_path)
    assert free["step"] == 6


def test_values_that_look_alike_are_runs_of_their_own(tmp_path):
    rates = [0.01, 0.010000001]
    found = sweep(BASE, {RATE: rates}, out=tmp_path / "new" / "folder")
    assert [run[RATE] for run in found] == rates
    assert len({run["folder"] for run in found}) == 2
    rows = table(find(tmp_path / "new" / "folder"))[1:]
    assert [row[0] for row in rows] == ["0.01", "0.010000001"]


@pytest.mark.parametrize(
    ("values", "seeds", "rule"),
    [
        ({SEED: [1, 2]}, None, "seeds are set with --seeds"),
        ({RATE: []}, None, "a sweep must have a run"),
        ({}, [], "a sweep must have a run"),
        ({RATE: [0.01, 0.01]}, None, f"{RATE} must have each value once"),
    ],
)
def test_a_call_of_sweep_that_says_nothing_or_two_things_makes_nothing(
    tmp_path, values, seeds, rule
):
    with pytest.raises(OptionError, match=rule):
        sweep(BASE, values, seeds=seeds, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_plan_that_is_no_file_is_refused_unread(tmp_path, make):
    create(tmp_path, {"seed=0": BASE})
    (tmp_path / ".sweep.json").unlink()
    make(tmp_path / ".sweep.json")
    with pytest.raises(MinigenError, match=r"cannot read .*sweep\.json: "):
        find(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [lambda plan, text=text: text for text in ("", "[]", "{}", '{"config": {}, "runs": {}}')]
    + [lambda plan, name=name: plan.replace("seed=0", name) for name in ("../x", ".x", "a/b")],
)
def test_a_damaged_plan_of_a_sweep_is_named_with_the_cure(tmp_path, damage):
    runs = {f"seed={seed}": BASE.override({"run.seed": seed}) for seed in (0, 1)}
    create(tmp_path, runs)
    plan = tmp_path / ".sweep.json"
    plan.write_text(damage(plan.read_text()))
    with pytest.raises(MinigenError, match=r"sweep\.json is damaged: remove it"):
        find(tmp_path)
    (tmp_path / ".sweep.json").unlink()
    assert find(tmp_path) == {tmp_path / name: config for name, config in runs.items()}


def test_a_run_that_fails_does_not_end_the_others(minigen: Command, here):
    settings = [*TINY_SETTINGS, "--set", f"{RATE}=1e300,0.01"]
    result = minigen("sweep", "fables", *settings, "--out", "out")
    assert result.status == 1
    [error] = [line for line in result.err.splitlines() if line.startswith("Error: ")]
    assert error.startswith(f"Error: {RATE}=1e300,seed=0: training diverged at step ")
    assert [line.split()[:3] for line in result.out.splitlines()[1:]][1] == ["1e+300", "0", "-"]


def test_one_bar_shows_the_steps_of_all_runs(minigen: Command, here):
    settings = [*TINY_SETTINGS, *RATES]
    result = minigen("sweep", "fables", *settings, "--out", "out", "--progress")
    assert re.search(r" 12/12 \[.*(step/s|s/step), 2 of 2 runs\]", result.err)


def test_the_bar_begins_at_no_step_of_runs_that_have_not_begun(minigen: Command, monkeypatch):
    futures: list[Future] = []

    class Waiting(Executor):
        def submit(self, *_):
            futures.append(Future())
            return futures[-1]

    def polled(folder):
        """Let one run after the other come to its end, each time all were looked at."""
        polls.append(folder)
        if len(polls) % 2 == 0:
            futures[len(polls) // 2 - 1].set_result(None)
        return {}

    polls: list[Path] = []
    monkeypatch.setattr(command, "_GLANCE", 0.01)
    monkeypatch.setattr(module, "last_metrics", polled)
    monkeypatch.setattr(pool, "pool", lambda *_, **__: nullcontext(Waiting()))
    settings = [*TINY_SETTINGS, *RATES]
    with monkeypatch.context() as patch:
        patch.setattr(command, "_print", lambda rows: None)
        patch.setattr(module, "table", lambda runs: [])
        err = minigen("sweep", "fables", *settings, "--out", "out", "--progress").err
    assert set(re.findall(r" \d+/12 \[", err)) == {" 0/12 ["}
    assert [f"{done} of 2 runs" in err for done in range(2)] == [True, True]


def test_a_process_that_is_killed_is_told_with_the_way_on(minigen: Command, monkeypatch):
    def killed(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(command, "_train_all", killed)
    result = minigen("sweep", "fables", *TINY_SETTINGS, "--out", "out")
    assert (result.status, result.out, result.err) == (
        1,
        "",
        "Error: a process of the sweep was killed, for want of memory most often; to go on: "
        "minigen sweep --resume --out out\n",
    )


def test_a_folder_that_a_worker_does_not_see_is_told(tmp_path):
    with pytest.raises(MinigenError, match="does not see it: --out must be on a disk that all"):
        command._train(tmp_path / "elsewhere")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux, to choose cores")
def test_a_folder_that_is_there_is_filled_and_stays_what_it_is(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o750)
    link.symlink_to(real)
    before = real.stat()
    create(link, plan(BASE, {}, range(2)))
    assert (real.stat().st_ino, real.stat().st_mode) == (before.st_ino, before.st_mode)
    assert {entry.name for entry in runs_in(real)} == {"seed=0", "seed=1"}
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    monkeypatch.chdir("here")
    create(Path("."), plan(BASE, {}, range(2)))
    assert len(find(Path("."))) == 2


def test_the_helpers_of_a_sweep_that_is_killed_end_with_it(tmp_path):
    (tmp_path / "killed.py").write_text(
        "import os, signal, time\n"
        "from minigen.training.pool import pool\n"
        "from minigen.training.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    with pool(Workers(), 1) as executor:\n"
        "        executor.submit(os.getpid).result()\n"
        "        executor.submit(time.sleep, 600)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.Popen([sys.executable, tmp_path / "killed.py"], stdout=subprocess.PIPE)
    process.communicate(timeout=PATIENCE)  # to the end of all that could still write
    assert process.returncode == -signal.SIGKILL


def test_a_sweep_that_cannot_be_planned_leaves_no_folder_that_was_not_there(tmp_path, monkeypatch):
    def refuse(*_):
        raise MinigenError("no room")

    monkeypatch.setattr(module, "write_atomically", refuse)
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        with pytest.raises(MinigenError, match="no room"):
            create(tmp_path / name, plan(BASE, {}, range(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("writes", range(4))
def test_a_sweep_killed_while_it_is_made_is_all_there_or_not_at_all(tmp_path, monkeypatch, writes):
    class Killed(BaseException):
        pass

    left, write = [None] * writes, module.write_atomically

    def counted(path, data):
        if not left:
            raise Killed
        left.pop()
        write(path, data)

    runs, out = plan(BASE, {}, range(3)), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", counted)
        patch.setattr(Path, "rmdir", lambda _: None)  # a kill cleans nothing up
        with pytest.raises(Killed):
            create(out, runs)
    if writes == 0:
        with pytest.raises(MinigenError, match="no sweep to resume"):
            find(out)
        create(out, runs)
    found = find(out)
    assert {folder.name for folder in found} == set(runs)
    for folder, config in found.items():
        mend(folder, config)
    assert find(out) == found
    assert {entry.name for entry in out.iterdir()} == {*runs, ".sweep.json"}


@pytest.mark.parametrize(
    ("cores", "interruption"),
    [
        (1, "os.kill(os.getppid(), signal.SIGTERM)"),
        (1, "os.killpg(os.getpgid(os.getppid()), signal.SIGINT)"),  # what Ctrl-C does in a terminal
        (2, "os.kill(os.getppid(), signal.SIGHUP)"),  # with a helper that has no run any more
    ],
)
def test_an_interruption_saves_every_run_once_and_says_how_to_go_on(tmp_path, cores, interruption):
    code = (
        "import os, signal, time\n"
        "from minigen.cli import run\n"
        "from minigen.training import pool\n"
        "from minigen.training.folder import RunFolder\n"
        f"steps, pool.cores = RunFolder.steps, lambda: range({cores})\n"
        "def interrupted(folder):\n"
        "    for record in steps(folder):\n"
        f"        if record.step == 3 and folder.path.name == 'seed={cores - 1}':\n"
        f"            while len([*folder.path.parent.glob('*/*6.safetensors')]) < {cores - 1}:\n"
        "                time.sleep(0.01)\n"
        "            time.sleep(0.3)  # until the other one waits for a run\n"
        f"            {interruption}\n"
        "            while not folder.run.workers.asked_to_stop: time.sleep(0.01)\n"
        "        yield record\n"
        "RunFolder.steps = interrupted\n"
        "if __name__ == '__main__': raise SystemExit(run())\n"
    )
    (tmp_path / "job.py").write_text(code)
    seeds = f"0:{4 - cores}"
    arguments = ["sweep", "fables", *TINY_SETTINGS, "--seeds", seeds, "--out", "out"]
    done = subprocess.run(
        [sys.executable, "job.py", *arguments],
        start_new_session=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stderr.endswith("interrupted; to go on: minigen sweep --resume --out out\n")
    assert done.returncode == 130
    saved = {path.name for path in (tmp_path / f"out/seed={cores - 1}").glob("step-*")}
    assert saved == {"step-000000.safetensors", "step-000003.safetensors"}
    others = {path.parent.name for path in (tmp_path / "out").glob("*/step-*")}
    assert others == {f"seed={seed}" for seed in range(cores)}  # no other run was begun


def test_what_a_helper_warns_of_is_a_note_and_all_that_is_said(tmp_path):
    (tmp_path / "text").write_bytes(b"\x1f\x8b\x08" + bytes(range(256)))
    arguments = ["sweep", *TINY_SETTINGS, "--text", "text", "--seeds", "0:2", "--out", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "minigen", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    warning = f"Warning: {tmp_path}/text looks like gzip; its bytes are taken as they are"
    said = {*done.stderr.splitlines()} - {"compiling the training loops, which takes some seconds"}
    assert said == {"training seed=0", "training seed=1", warning}


# ---- The table


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (b'{"step": 1}\n', {"step": 1}),
        (b'{"step": 1}\n' * 9 + b'{"step": 2}\n{"st', {"step": 2}),
        (b'{"step": 1}\n{"step": 2, "loss": NaN}\n', {}),
        (b'{"step": 1}', {}),
        (b"", {}),
    ],
)
def test_the_last_whole_line_of_the_metrics_is_found_at_their_end(tmp_path, monkeypatch, log, last):
    monkeypatch.setattr(module, "_TAIL", 20)
    assert module.last_metrics(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_bytes(log)
    assert module.last_metrics(tmp_path) == last


def test_the_table_gives_mean_and_standard_deviation_of_what_came_to_its_end(tmp_path):
    runs = {}
    for rate in (0.1, 0.02):
        for seed, loss in enumerate((1.0, 2.0, 4.0)):
            folder = tmp_path / f"{rate}-{seed}"
            folder.mkdir()
            lines = '{"loss": 9.0}\n{"step": 6, "loss": %s}\n{"cut' % (loss * 10 * rate)
            (folder / "metrics.jsonl").write_text(lines)
            if (rate, seed) != (0.1, 2):
                (folder / "step-000006.safetensors").touch()
            runs[folder] = BASE.override({RATE: rate, "run.seed": seed})
    assert table(runs) == [
        [RATE, "seeds", "loss", "validation loss"],
        ["0.02", "3", "0.4667 ± 0.3055", "-"],  # the smaller value first
        ["0.1", "2", "1.5000 ± 0.7071", "-"],
    ]
    (tmp_path / "0.1-0/metrics.jsonl").write_text('{"step": 6, "loss": 2, "validation_loss": 3}\n')
    changes = [{"sampling.top_k": 10}, {"sampling.top_k": 9}, {"optimizer.name": "sgd"}, {}]
    runs = {}
    for number, change in enumerate(changes):
        folder = shutil.copytree(tmp_path / "0.1-0", tmp_path / str(number))
        runs[folder] = BASE.override(change)
    end = ["1", "2.0000", "3.0000"]
    assert table(runs) == [
        ["optimizer.name", "sampling.top_k", "seeds", "loss", "validation loss"],
        ["adamw", "9", *end],
        ["adamw", "10", *end],
        ["adamw", "None", *end],
        ["sgd", "None", *end],
    ]


def test_a_folder_that_was_mended_is_free_at_once_whatever_keeps_the_fault(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="needs the locks of a POSIX system")
    kept = []

    def fail(folder):
        kept.append(MinigenError("no config"))
        raise kept[0]  # which keeps the frames that it passed

    monkeypatch.setattr(Config, "of_run", fail)
    mend(tmp_path / "run", Config.load("bigram"))
    assert kept
    descriptor = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as another process would
    os.close(descriptor)
