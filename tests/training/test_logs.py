"""A checkpoint knows its logs: what it vouches for is never lost, doubled or changed in silence."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from minigen import Config, MinigenError, Run, verify, write_report
from minigen.training import checkpoint
from minigen.training import logs as module
from minigen.training.folder import RunFolder
from minigen.training.logs import (
    METRICS,
    NO_LOG,
    SAMPLES,
    TIMING,
    Log,
    end_of,
    parse,
    read_lines,
)
from minigen.training.sweep import mend
from tests.conftest import TINY, Result

pytestmark = pytest.mark.filterwarnings("default:.*has lost, doubled or changed a line")

Command = Callable[..., Result]
STEPS = TINY["training.steps"]
VOUCHED = (METRICS, SAMPLES)


@pytest.fixture
def folder(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, with checkpoints of steps 0, 4 and 6."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "timing.jsonl"}


def lines_of(log: bytes) -> list[bytes]:
    return log.splitlines(keepends=True)


DAMAGES = {
    "shortened": lambda log: log[: len(log) // 2],
    "emptied": lambda log: b"",
    "doubled": lambda log: log + log,
    "line doubled": lambda log: b"".join([lines_of(log)[0], *lines_of(log)]),
    "line lost": lambda log: b"".join(lines_of(log)[1:]),
    "lines exchanged": lambda log: b"".join(reversed(lines_of(log))),
    "NULs": lambda log: b"\0" * len(log),
    "line ends": lambda log: log.replace(b"\n", b"\r\n"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("log", VOUCHED)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_noticed_and_mended_to_the_same_bytes(
    damage: str, log: str, folder: Path, minigen: Command
) -> None:
    whole = contents(folder)
    (folder / log).write_bytes(DAMAGES[damage](whole[log]))
    found = minigen("train", "--resume", "--out", str(folder))
    assert found.status == 0
    if damage == "doubled":
        assert f"{folder / log} holds lines that are not the run's own behind" in found.err
    else:
        assert f"{folder}: {log} has lost, doubled or changed a line that step-000006" in found.err
        assert "goes on from step" in found.err
    assert contents(folder) == whole


@pytest.mark.parametrize(("damage", "log"), [("line lost", METRICS), ("shortened", SAMPLES)])
def test_whoever_trusts_a_log_that_was_damaged_says_so(
    damage: str, log: str, folder: Path, tmp_path: Path, minigen: Command
) -> None:
    """Verify, diff and the page; what the checkpoints hold is right all the same."""
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    lines = lines_of((folder / log).read_bytes())
    damaged = DAMAGES[damage](b"".join(lines))
    (folder / log).write_bytes(damaged)
    doubt = f"{log} has lost, doubled or changed a line that step-000006.safetensors vouches for"
    for command in (("verify", folder), ("diff", whole, folder), ("diff", folder, whole)):
        found = minigen(*map(str, command))
        assert (found.status, found.err.count(doubt)) == (0, 1)
        assert f"{folder}: {doubt}" in found.err
    for path, doubts in ((folder, 1), (whole, 0)):
        page = write_report(path).read_text(encoding="utf-8")
        assert page.count(doubt) == doubts
    assert doubt not in minigen("verify", str(whole)).err


@pytest.mark.parametrize("log", VOUCHED)
def test_one_flipped_bit_anywhere_is_noticed(log: str, folder: Path) -> None:
    config, whole = Config.load(folder / "config.toml"), (folder / log).read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 12)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        (folder / log).write_bytes(flipped)
        with pytest.warns(UserWarning, match="the logs are whole"):
            resumed = RunFolder.resume(folder, config)
        assert resumed.run.step < STEPS


def test_the_run_goes_on_from_the_latest_checkpoint_whose_logs_are_whole(folder: Path) -> None:
    lines = lines_of((folder / METRICS).read_bytes())
    (folder / METRICS).write_bytes(b"".join(lines[:5]))
    with pytest.warns(UserWarning, match="goes on from step 4"):
        resumed = RunFolder.resume(folder, Config.load(folder / "config.toml"))
    assert resumed.run.step == 4


def test_where_no_checkpoint_agrees_it_is_refused_and_nothing_changed(
    folder: Path, minigen: Command
) -> None:
    (folder / "step-000000.safetensors").unlink()
    (folder / METRICS).unlink()
    before = contents(folder)
    found = minigen("train", "--resume", "--out", str(folder))
    assert (found.status, found.err.count("\n")) == (1, 1)
    assert "no other checkpoint agrees with the logs: put the log back as it was" in found.err
    assert contents(folder) == before


@pytest.mark.parametrize("log", VOUCHED)
def test_a_log_that_cannot_be_read_is_not_taken_for_a_damaged_one(
    log: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, config = contents(folder), Config.of_run(folder)
    real, told = module.opened, f"cannot read {folder / log}: Permission denied"

    def opened(path: Path) -> object:
        if path.name == log:
            raise MinigenError(told)
        return real(path)

    with monkeypatch.context() as refusing:
        refusing.setattr(module, "opened", opened)
        for go_on in (lambda: RunFolder.resume(folder, config), lambda: mend(folder, config)):
            with pytest.raises(MinigenError) as caught:
                go_on()
            assert str(caught.value) == told
        with pytest.warns(UserWarning, match=f"^{re.escape(f'{folder}: {told}')}$"):
            assert verify(folder) == []  # which trusts checkpoints alone
    assert contents(folder) == before


def test_a_log_for_which_nobody_vouches_ends_before_what_cannot_be_read(tmp_path: Path) -> None:
    log, line = tmp_path / METRICS, b'{"step": 1}\n'
    log.write_bytes(line + b"rubbish\n" + line)
    with pytest.warns(UserWarning, match="its lines from byte 12 on cannot be read"):
        assert end_of(log, 5) == len(line)
    log.write_bytes(line + b'{"step": 6}\n' + line)
    assert end_of(log, 5) == len(line)


def test_behind_what_is_vouched_for_stand_lines_of_later_steps_or_one_cut_short(
    tmp_path: Path,
) -> None:
    log, own = tmp_path / METRICS, b'{"step": 6}\n'
    for behind, is_strange in {
        b"": False,
        b'{"step": 7}\n{"step": 1}\n': False,
        b'{"step": 6}\n': True,
        b'{"step": 6}': False,
        b"rubbish\n": True,
    }.items():
        log.write_bytes(own + behind)
        vouched = {SAMPLES: module.NO_LOG, METRICS: module.NO_LOG | {"bytes": len(own)}}
        assert module.strange(tmp_path, vouched, 6) == (log if is_strange else None)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("left", "emptied", "is_said"),
    [(VOUCHED, (), True), (VOUCHED, (SAMPLES,), True), (VOUCHED, VOUCHED, False), ((), (), False)],
)
def test_logs_without_a_checkpoint_are_begun_anew_and_it_is_said(
    left: tuple[str, ...],
    emptied: tuple[str, ...],
    is_said: bool,
    folder: Path,
    minigen: Command,
) -> None:
    whole = contents(folder)
    for file in folder.iterdir():
        if file.name.startswith("step-") or file.name in set(VOUCHED) - set(left):
            file.unlink()
    for log in emptied:
        (folder / log).write_bytes(b"")
    found = minigen("train", "--resume", "--out", str(folder))
    assert found.status == 0
    said = f"{folder} holds logs and no checkpoint: the run is trained again from"
    assert (said in found.err) == is_said
    assert contents(folder) == whole


@pytest.mark.parametrize("step", range(STEPS))
def test_a_save_at_any_step_vouches_for_the_logs_up_to_it(step: int, tmp_path: Path) -> None:
    """As on interruption; the logs are on the disk before the checkpoint is."""
    run = RunFolder.create(tmp_path / "run", Run(Config.load("fables", TINY)))
    records = run.steps()
    for _ in range(step):
        next(records)
    run.save()
    records.close()
    saved = checkpoint.load(run.latest)
    assert saved.logs is not None
    for log in VOUCHED:
        assert saved.logs[log]["bytes"] == (tmp_path / "run" / log).stat().st_size
    assert len(read_lines(tmp_path / "run" / METRICS)) == step


def test_logs_are_synced_before_the_checkpoint_that_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run", Run(Config.load("fables", TINY)))
    next(run.steps())
    synced, sync = [], os.fsync

    def noted(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    run.save()
    inodes = [(tmp_path / "run" / log).stat().st_ino for log in VOUCHED]
    assert synced[:2] == inodes
    assert run.latest.stat().st_ino in synced[2:]


def test_a_line_that_cannot_be_written_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run", Run(Config.load("fables", TINY)))
    write, calls = os.write, []

    def fails(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(MinigenError) as caught:
        next(run.steps())
    assert str(caught.value) == f"cannot write to {run.path}: No space left on device"
    assert (tmp_path / "run" / METRICS).read_bytes() == b""


@pytest.mark.parametrize("name", [METRICS, TIMING, SAMPLES])
def test_no_checkpoint_vouches_for_logs_that_lack_a_line_of_a_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = Config.load("fables", {**TINY, "sampling.every": 1}), tmp_path / "run"
    folder = RunFolder.create(path, Run(config))
    steps = folder.steps()
    next(steps)
    with monkeypatch.context() as full:
        full.setattr(folder._logs[name], "append", _no_room)
        with pytest.raises(MinigenError, match="No space left on device"):
            next(steps)
    for go_on in (folder.save, lambda: next(folder.steps())):
        with pytest.raises(MinigenError) as caught:
            go_on()
        assert str(caught.value) == (
            f"the logs of {path} end at step 1, and the run is at step 2: go on with "
            "RunFolder.resume, from the last checkpoint"
        )
    assert [*checkpoint.by_step(path)] == [0]
    again = RunFolder.resume(path, config)
    assert [record.step for record in again.steps()] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_lines(path / name)] == [1, 2, 3, 4, 5, 6]


def _no_room(_line: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(5, "Input/output error", "text.txt"), "text.txt: Input/output error"),
        (OSError(5, "Input/output error"), "its text: Input/output error"),
        (OSError("odd"), "its text: odd"),
    ],
)
def test_what_a_training_cannot_read_is_no_fault_of_its_folder(
    error: OSError, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Run) -> None:
        raise error

    folder = RunFolder.create(tmp_path / "run", Run(Config.load("fables", TINY)))
    monkeypatch.setattr(Run, "_advance", fails)
    with pytest.raises(MinigenError) as caught:
        next(folder.steps())
    latest = tmp_path / "run/step-000000.safetensors"
    assert str(caught.value) == f"{said}; the last checkpoint, {latest}, is intact"


def test_timing_says_how_long_each_step_took_to_the_microsecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((1.0, 3.25, 10.0, 10.1234567))  # before and after each step
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr("minigen.training.folder.time", clock)
    records = RunFolder.create(tmp_path / "run", Run(Config.load("fables", TINY))).steps()
    next(records), next(records)
    assert read_lines(tmp_path / "run" / TIMING) == [
        {"step": 1, "seconds": 2.25},
        {"step": 2, "seconds": 0.123457},
    ]


def test_checkpoints_without_logs_load_and_go_on(folder: Path) -> None:
    """Those of before, and those that a Run saves from Python."""
    whole = contents(folder)
    for path in folder.glob("step-*"):
        checkpoint.save(path, replace(checkpoint.load(path), logs=None))
    (folder / "step-000006.safetensors").unlink()
    config = Config.load(folder / "config.toml")
    for _ in RunFolder.resume(folder, config).steps():
        pass
    assert (folder / METRICS).read_bytes() == whole[METRICS]
    assert (folder / "step-000006.safetensors").read_bytes() == whole["step-000006.safetensors"]
    Run.load(folder).save(folder / "alone")
    assert checkpoint.load(folder / "alone").logs is None


@pytest.mark.parametrize(
    "logs",
    [
        {},
        {"/dev/zero": {"bytes": 1 << 60, "sha256": ""}},
        {name: {"bytes": -1, "sha256": ""} for name in VOUCHED},
        {name: {"bytes": 10**400, "sha256": 0} for name in VOUCHED},
        dict.fromkeys(VOUCHED, 5),
    ],
)
def test_a_checkpoint_vouches_for_these_two_logs_alone(logs: object, folder: Path) -> None:
    saved = checkpoint.load(folder / "step-000006.safetensors")
    with pytest.raises(MinigenError, match="logs must hold the bytes and the sha256 of"):
        checkpoint.save(folder / "step-000006.safetensors", replace(saved, logs=logs))


# ── What is behind a log's name ──────────────────────────────────────────────────────────────────


def test_an_empty_log_is_what_a_file_without_logs_vouches_for(tmp_path: Path) -> None:
    assert Log(tmp_path / METRICS, 0).sync() == NO_LOG


def lay_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="a flag of POSIX")
def test_a_link_that_is_laid_after_the_look_at_a_log_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_link(tmp_path / METRICS, tmp_path / "elsewhere")
    monkeypatch.setattr(module, "require_own", lambda path: None)
    with pytest.raises(OSError, match="symbolic links"):
        Log(tmp_path / METRICS, 0)
    assert not (tmp_path / "elsewhere").exists()


def lay_hard_link(path: Path, elsewhere: Path) -> None:
    os.link(elsewhere, path)


def lay_pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are POSIX's")
@pytest.mark.parametrize("log", ["metrics.jsonl", "samples.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("lay", [lay_link, lay_hard_link, lay_pipe])
def test_a_log_that_is_no_file_of_the_folder_is_refused_untouched(
    lay: Callable[[Path, Path], None], log: str, folder: Path, minigen: Command
) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes((folder / log).read_bytes() + b'{"step": 9}\n')
    before = elsewhere.read_bytes()
    (folder / log).unlink()
    lay(folder / log, elsewhere)
    with pytest.raises(MinigenError, match="must be a regular file with one name"):
        Log(folder / log, 0)
    found = minigen("train", "--resume", "--out", str(folder))
    assert (found.status, found.err.count("\n")) == (1, 1)
    assert f"{folder / log} must be a regular file with one name" in found.err
    assert elsewhere.read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed on Windows")
def test_nor_is_a_link_followed_that_was_laid_at_the_last_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Path(shutil.copy(folder / METRICS, folder.parent))
    (folder / METRICS).unlink()
    (folder / METRICS).symlink_to(elsewhere)
    monkeypatch.setattr(module, "require_own", lambda path: None)
    before = elsewhere.read_bytes()
    with pytest.raises(OSError, match="symbolic link"):
        Log(folder / METRICS, 0)
    assert elsewhere.read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux, to count open files")
def test_a_log_is_as_readable_as_any_other_file_and_is_closed_when_it_is_let_go(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain").touch()
    before = os.listdir("/proc/self/fd")
    log = Log(tmp_path / METRICS, 0)
    log.append({"step": 1})
    again = Log(tmp_path / METRICS, log.sync()["bytes"])
    assert again.sync() == log.sync()
    again.append({"step": 2, "text": "é"})
    assert (tmp_path / METRICS).read_text("utf-8") == '{"step": 1}\n{"step": 2, "text": "é"}\n'
    assert (tmp_path / METRICS).stat().st_mode == (tmp_path / "plain").stat().st_mode
    del log, again
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are POSIX's")
def test_nobody_waits_for_a_pipe_in_place_of_a_log(folder: Path, minigen: Command) -> None:
    (folder / METRICS).unlink()
    os.mkfifo(folder / METRICS)
    found = minigen("report", str(folder))
    assert (found.status, found.err.count("\n")) == (1, 1)
    assert "is not a regular file" in found.err
    assert minigen("verify", str(folder)).status == 0  # a log is an aid alone


# ── Hostile lines ────────────────────────────────────────────────────────────────────────────────

HOSTILE = {
    "nested": b'{"step": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested elsewhere": b'{"step": 1, "loss": ' + b"[" * 900 + b"]" * 900 + b"}",
    "NaN": b'{"step": NaN}',
    "NaN id": b'{"step": 1, "token_ids": [NaN]}',
    "huge step": b'{"step": 1' + b"0" * 400 + b"}",
    "huger step": b'{"step": 1' + b"0" * 5000 + b"}",
    "huge loss": b'{"step": 1, "loss": 1e400}',
    "huge id": b'{"step": 1, "token_ids": [1' + b"0" * 400 + b"]}",
    "true": b'{"step": true}',
    "no step": b"{}",
    "number": b"1",
    "not UTF-8": b'{"step": 1, "text": "\xff"}',
    "NULs": b"\0" * 1000,
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_line_is_refused_in_one_short_line(hostile: str, folder: Path) -> None:
    log = folder / METRICS
    log.write_bytes(log.read_bytes() + HOSTILE[hostile] + b"\n")
    with pytest.raises(MinigenError, match="is damaged, line 7: ") as raised:
        read_lines(log)
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("command", "hostile"), [("report", "nested"), ("verify", "NaN id"), ("diff", "huge step")]
)
def test_every_command_reads_logs_so(
    hostile: str, command: str, folder: Path, tiny_run: Path, minigen: Command
) -> None:
    log = folder / METRICS
    log.write_bytes(HOSTILE[hostile] + b"\n" + log.read_bytes())
    arguments = [command, str(folder), *([str(tiny_run)] if command == "diff" else [])]
    found = minigen(*arguments)
    assert "Traceback" not in found.err
    assert "unexpected" not in found.err
    assert found.err.count("Error: ") == (0 if command == "verify" else 1)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ('"step": 0', '"step": -1'),
        (f'"step": {2**63 - 1}', f'"step": {2**63}'),
        (f'"step": 1, "position": {2**258 - 1}', f'"step": 1, "position": {2**258}'),
        (f'"step": 1, "position": {1 - 2**258}', f'"step": 1, "position": {-(2**258)}'),
        ('"step": 1, "token_ids": [0, 1]', '"step": 1, "token_ids": [0, -1]'),
        ('"step": 1, "token_ids": []', '"step": 1, "token_ids": [0, true]'),
        ('"step": 1, "text": ""', '"step": 1, "text": null'),
        ('"step": 1, "loss": -1.5', '"step": 1, "loss": Infinity'),
        ('"step": 1, "loss": 1e308', '"step": 1, "loss": 1e309'),
    ],
)
def test_a_line_holds_a_step_and_numbers_texts_and_ids_in_their_ranges(inside, outside) -> None:
    assert parse(f"{{{inside}}}".encode()) == json.loads(f"{{{inside}}}")
    with pytest.raises(ValueError, match="of the wrong kind"):
        parse(f"{{{outside}}}".encode())


def test_a_line_without_end_is_cut_short_or_longer_than_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigen.training.logs._LONGEST", 20)
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n{"step": 2, "loss":')
    assert read_lines(tmp_path / METRICS) == [{"step": 1}]
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n{"step": 2, "loss": ')
    with pytest.raises(MinigenError, match="is damaged, line 2: "):
        read_lines(tmp_path / METRICS)


def test_what_a_log_holds_is_read_as_it_was_written(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / SAMPLES).read_bytes().splitlines()]
    assert read_lines(folder / SAMPLES) == lines
