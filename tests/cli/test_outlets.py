"""Whoever listens or does not: no work and no verdict depends on it."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minigen import cli
from minigen.cli.progress import note
from minigen.decoding.generator import Generator
from minigen.errors import MinigenError
from minigen.signals import STOP_SIGNALS
from tests.conftest import PATIENCE, TINY_SETTINGS

MINIGEN = [sys.executable, "-m", "minigen"]
NO_ROOM = b"Error: cannot write to stdout: No space left on device\n"


def reader_gone() -> int:
    """Return a pipe's end for writing whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def run(*arguments: object, **streams: object) -> subprocess.CompletedProcess[bytes]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([*MINIGEN, *map(str, arguments)], timeout=PATIENCE, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that is not what its config gives, though nothing in it is damaged."""
    import dataclasses

    from minigen.training import checkpoint
    from minigen.training.config import Config
    from minigen.training.run import Run
    from tests.conftest import TINY

    path = tmp_path_factory.mktemp("bad") / "model.safetensors"
    trained = Run(Config.load("fables", TINY))
    trained.train(1)
    trained.save(path)
    saved = checkpoint.load(path)
    checkpoint.save(
        path, dataclasses.replace(saved, tensors={**saved.tensors, "b": saved.tensors["b"] + 1})
    )
    return path


STREAMS = {
    "a pipe that nobody reads": reader_gone,
    "a full disk": lambda: os.open("/dev/full", os.O_WRONLY),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("name", ["stdout", "stderr", "both"])
def test_a_training_ends_as_if_somebody_listened(
    tmp_path: Path, tiny_run: Path, kind: str, name: str
) -> None:
    stream = STREAMS[kind]()
    streams = {"stdout": stream, "stderr": stream} if name == "both" else {name: stream}
    done = run("train", *TINY_SETTINGS, "--progress", "--out", tmp_path / "run", **streams)
    os.close(stream)
    last = "step-000006.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tiny_run / last).read_bytes()
    unwritten = name != "stderr" and kind == "a full disk"  # its result is an error, then
    assert done.returncode == (1 if unwritten else 0)
    if name == "stdout" and unwritten:
        assert done.stderr.endswith(NO_ROOM)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_verdict_of_not_the_same_stands(bad_run: Path, kind: str) -> None:
    stream = STREAMS[kind]()
    assert run("verify", bad_run).returncode == 1
    assert run("verify", bad_run, stdout=stream).returncode == 1
    os.close(stream)


def test_a_sweep_of_which_a_run_fails_says_so_to_its_status(tmp_path: Path) -> None:
    rates = ["--set", "optimizer.learning_rate=0.01,1e9", "--out", str(tmp_path / "sweep")]
    stream = reader_gone()
    done = run("sweep", *TINY_SETTINGS, *rates, stdout=stream)
    os.close(stream)
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["info", "score", "next", "generate", "evaluate"])
def test_an_answer_ends_with_its_reader_and_is_an_error_on_a_full_disk(
    tiny_run: Path, command: str
) -> None:
    arguments = [command, tiny_run, *(["a"] if command not in ("info", "evaluate") else [])]
    for kind, expected in (("a pipe that nobody reads", (0, b"")), ("a full disk", (1, NO_ROOM))):
        stream = STREAMS[kind]()
        done = run(*arguments, stdout=stream)
        os.close(stream)
        assert (done.returncode, done.stderr) == expected


def test_an_answer_that_is_written_at_its_end_alone_ends_with_its_reader_too(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    pieces = Generator.pieces
    monkeypatch.setattr(
        Generator, "pieces", lambda *a, **k: (made.append(one) or one for one in pieces(*a, **k))
    )
    for how, is_live in (("--stream", True), ("--no-stream", False)):
        made.clear()
        with os.fdopen(reader_gone(), "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert cli.run(["generate", str(tiny_run), "a", how]) == 0
        assert (len(made) == 1) == is_live


def test_an_answer_without_end_ends_with_its_reader(tiny_run: Path) -> None:
    stream = reader_gone()
    endless = ["--max-new-tokens", 10**9, "--suppress-token", 256]
    script = ["sh", "-c", 'ulimit -t 60; exec "$@"', "sh", *MINIGEN]  # else a fault takes hours
    command = [*script, "generate", tiny_run, "a", *map(str, endless)]
    done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, timeout=PATIENCE)
    os.close(stream)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- Signals

TRAIN = [
    "train",
    *TINY_SETTINGS,
    "--set",
    "training.steps=100000",
    "--set",
    "optimizer.decay=constant",
]
STOPS = ["SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1"]


def start(folder: Path, *before: str) -> subprocess.Popen[bytes]:
    """Start a training without end; return it once it trains."""
    process = subprocess.Popen(
        [*before, *MINIGEN, *TRAIN, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr
    process.stderr.readline()
    return process


@pytest.mark.parametrize("name", STOPS)
def test_a_signal_to_stop_saves_and_says_how_to_go_on_even_said_twice(
    tmp_path: Path, name: str
) -> None:
    process = start(tmp_path / "it's my $HOME")
    for _ in range(1 if name == "SIGINT" else 2):
        process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    saved, how = err.decode().splitlines()[-2:]
    assert saved.startswith("interrupted at step ")
    command = how.removeprefix("to go on: minigen ")
    shell = f"{sys.executable} -m minigen {command} --set training.steps=1"  # fewer than done
    pasted = subprocess.run(["sh", "-c", shell], capture_output=True, cwd=tmp_path)
    assert b"training.steps cannot change" in pasted.stderr  # it has found the run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_while_an_object_is_removed_is_not_lost(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is raised in there Python only prints."""

    class Removed:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(PATIENCE)

    def main(*_: object, **__: object) -> None:
        Removed()
        time.sleep(PATIENCE)

    monkeypatch.setattr(cli.cli, "main", main)
    assert (cli.run([]), capsys.readouterr().err) == (130, "Error: interrupted\n")


@pytest.mark.parametrize(
    ("numbers", "seen"),
    [
        ([signal.SIGINT, signal.SIGINT], 2),
        ([signal.SIGTERM, signal.SIGTERM], 1),
        ([signal.SIGTERM, signal.SIGINT], 2),
    ],
)
def test_a_second_ctrl_c_is_meant_and_any_other_signal_said_twice_is_one(
    numbers: list[int], seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruptions = []

    def main(*_: object, **__: object) -> None:
        for number in numbers:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                interruptions.append(number)
        raise MinigenError("what an interrupted library says")

    monkeypatch.setattr(cli.cli, "main", main)
    assert (cli.run([]), len(interruptions)) == (130, seen)


def test_what_else_is_raised_while_an_object_is_removed_python_prints_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Removed:
        def __del__(self) -> None:
            raise ValueError

    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))
    before = sys.unraisablehook
    monkeypatch.setattr(cli.cli, "main", lambda *_, **__: Removed() and None)
    assert (cli.run([]), told, sys.unraisablehook) == (0, [ValueError], before)


def test_a_process_ends_with_the_status_and_nothing_interrupts_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(cli, "run", lambda: 7)
    try:
        with pytest.raises(SystemExit, match="7"):
            cli.main()
        assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_that_the_launcher_ignores_stays_ignored(tmp_path: Path, name: str) -> None:
    ignoring = f"trap '' {name.removeprefix('SIG')}; exec \"$@\""
    process = start(tmp_path / "run", "sh", "-c", ignoring, "sh")
    process.send_signal(getattr(signal, name))
    assert process.stderr
    process.stderr.readline()  # it trains on
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130


# ---- Whoever else writes there


class Pieces(io.RawIOBase):
    """A stream that notes what it is given at a time."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return len(data)


def test_a_line_for_stderr_is_written_in_one_piece_even_unbuffered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def say(*_: object, **__: object) -> None:
        note("a note\nof two lines")
        print("printed", 1, file=sys.stderr)
        raise MinigenError("told")

    raw = Pieces()
    monkeypatch.setattr("minigen.training.checkpoint.locate", say)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))  # type: ignore[type-var]
    assert cli.run(["info", "x"]) == 1
    assert [piece for piece in raw.pieces if piece] == [
        b"a note\nof two lines\n",
        b"printed 1\n",
        b"Error: told\n",
    ]


def test_what_is_said_without_a_line_end_is_out_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Pieces()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw))  # type: ignore[type-var]
    count = []
    monkeypatch.setattr(cli.cli, "main", lambda *_, **__: count.append(sys.stderr.write("so far")))
    assert (cli.run([]), count, raw.pieces) == (0, [6], [b"so far"])


def test_a_name_that_is_no_text_is_told_with_what_can_be_shown_of_it() -> None:
    done = run("info", b"no\xffname".decode(errors="surrogateescape"))
    assert done.stderr.startswith(b"Error: cannot load no?name: ")


# ---- Whatever is raised

AT = "(at <string>:2); please report it\n"  # the line of the code below that raises it


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("EOFError('Ran out of input')", f"Error: unexpected EOFError: Ran out of input {AT}"),
        ("MemoryError('no X')", "Error: there is not enough memory: no X\n"),
        ("MemoryError()", "Error: there is not enough memory\n"),
        ("SystemExit('text')", f"Error: unexpected SystemExit: text {AT}"),
        ("RecursionError('too deep')", f"Error: unexpected RecursionError: too deep {AT}"),
        ("type('Panic', (BaseException,), {})('a\\nb')", f"Error: unexpected Panic: a b {AT}"),
        ("BrokenPipeError(32, 'Broken pipe')", "Error: Broken pipe\n"),
        ("PermissionError(13, 'No', 'x')", "Error: x: No\n"),
        ("OSError('of no number')", "Error: of no number\n"),
        ("ImportError('no X', name='x')", "Error: x cannot be loaded: no X; install minigen again"),
    ],
)
def test_whatever_a_library_raises_is_told_in_one_line(error: str, told: str) -> None:
    code = (
        "import minigen.training.checkpoint as c, minigen.cli as cli\n"
        f"def load(*_, **__): raise {error}\n"
        "c.load = load\n"
        "raise SystemExit(cli.run(['generate', 'model']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=PATIENCE, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1
