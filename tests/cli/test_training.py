"""What `train` says on its way, to whom, and how it ends: by itself, by a signal, by an error."""

import io
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minigen.cli import training
from minigen.errors import MinigenError
from minigen.report import page
from minigen.training import workers
from minigen.training.folder import RunFolder
from minigen.training.run import StepRecord
from minigen.training.workers import Workers
from tests.conftest import TINY_SETTINGS, Result

Command = Callable[..., Result]


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a signal to stop come while this step is taken."""
    steps = RunFolder.steps

    def interrupted(folder: RunFolder) -> Iterator[StepRecord]:
        for record in steps(folder):
            if record.step == step:
                signal.raise_signal(signal.SIGTERM)
            yield record

    monkeypatch.setattr(RunFolder, "steps", interrupted)


# ---- What it says


def test_what_a_step_measured_and_wrote_is_said(minigen: Command) -> None:
    result = minigen("train", *TINY_SETTINGS, "--set", "sampling.suppress_tokens=[256]")
    said = ["training: steps 1 to 6"]
    metrics, texts = (
        [json.loads(line) for line in Path(f"runs/fables/{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "samples")
    )
    for line in metrics:
        step = line["step"]
        if step in (3, 6):
            loss = line["validation_loss"]
            said.append(f"step {step}: validation loss {loss:.4f} nats per token")
        said += [f"step {step}: {t['prompt']}{t['text']}" for t in texts if t["step"] == step]
    assert (result.status, result.err) == (0, "\n".join([*said, ""]))


def test_of_a_sample_that_came_to_a_dead_end_it_is_said_why(minigen: Command) -> None:
    ids = ",".join(map(str, range(257)))
    rules = ["--set", "sampling.prompt=a", "--set", f"sampling.suppress_tokens=[{ids}]"]
    steps = ["--set", "training.steps=2", "--set", "evaluation.every=0"]
    err = minigen("train", *TINY_SETTINGS, *steps, *rules).err
    assert re.search(r"\nstep 2: a\nstep 2: the sample ended early: .*suppress_tokens", err)


def test_what_a_config_asks_for_in_vain_is_said(minigen: Command) -> None:
    Path("short.txt").write_text("abab" * 9)
    several = ["--set", "tokenizer.vocab_size=300", "--text", "short.txt"]
    result = minigen("train", *TINY_SETTINGS, *several)
    assert result.err.startswith(
        "the text has pairs for 262 tokens, fewer than tokenizer.vocab_size allows\n"
        "training: steps 1 to 6\n"
    )
    whole = [*several, "--set", "corpus.validation_fraction=0"]
    for every, said in ((3, True), (0, False)):
        options = ["--set", f"evaluation.every={every}", "--out", f"every-{every}"]
        err = minigen("train", *TINY_SETTINGS, *whole, *options).err
        assert ("no text is left for validation" in err) == said


def test_a_bar_shows_the_step_the_loss_and_how_fast_it_goes(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    minigen("train", *TINY_SETTINGS, "--set", "optimizer.decay=constant", "--out", "run")
    clock = iter([100.0, 102.0, 104.0])  # two steps of two seconds, of 16 tokens each
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    longer = ["--resume", "--out", "run", "--set", "training.steps=8", "--progress"]
    bar = minigen("train", *longer).err.replace("\n", "\r").split("\r")
    loss = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert any(re.match(r"training:  75%\|.* 6/8 \[", line) for line in bar)
    last = next(line for line in reversed(bar) if line.startswith("training:"))
    assert re.search(rf" 8/8 \[.*(step/s|s/step), loss {loss:.3f}, 8 tokens/s\]", last)
    assert last.startswith("training: 100%|")


# ---- How it ends


def test_a_run_on_standard_input_that_is_interrupted_goes_on_with_it(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(3, monkeypatch)
    Path("text.txt").write_text("to be or not to be")
    mixed = ["--text", "-", "--text", str(Path("text.txt").absolute())]
    texts = {"run-": ["--text", "-"], "run": ["--text", "text.txt"], "mixed": mixed}
    for out, text in texts.items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"to be or not to be")))
        result = minigen("train", *TINY_SETTINGS, *text, "--out", out)
        assert (result.status, result.out) == (130, "")
        words = f" {shlex.join(text)}" if "-" in text else ""
        assert result.err.endswith(
            f"interrupted at step 3, saved {out}/step-000003.safetensors\n"
            f"to go on: minigen train --resume --out {out}{words}\n"
        )
    assert minigen("train", "--resume", "--out", "run-") == Result(
        1,
        "",
        "Error: the run in run- was trained on standard input: give the same text with --text\n",
    )
    for on in (["run-", "--text", "-"], ["run"], ["mixed", *mixed]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"to be or not to be")))
        assert minigen("train", "--resume", "--out", *on).status == 0


def test_what_a_run_read_from_a_pipe_is_never_waited_for_again(
    minigen: Command, tmp_path: Path
) -> None:
    text, pipe = "to be or not to be", tmp_path / "pipe"
    Path("text.txt").write_text(text)
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[text])
    writer.start()
    assert minigen("train", *TINY_SETTINGS, "--text", str(pipe), "--out", "run").status == 0
    writer.join()
    pipe.unlink()
    pipe.symlink_to("/dev/null")  # of its kind, and keeps no test waiting
    for command in (
        ["evaluate", "run"],
        ["verify", "run"],
        ["prove", "run/config.toml"],
        ["train", "--resume", "--out", "run"],
    ):
        result = minigen(*command)
        assert (result.status, result.err.count("\n")) == (1, 1)
        assert f"trained on {pipe}, which cannot be read again: give " in result.err
        assert "--text" in result.err
    assert minigen("sweep", "run/config.toml", "--text", str(pipe)).status == 2
    assert minigen("report", "run").status == 0
    assert "not read from a file" in Path("run/report.html").read_text()
    for command in (["evaluate", "run"], ["verify", "run"], ["train", "--resume", "--out", "run"]):
        assert minigen(*command, "--text", "text.txt").status == 0


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda path: None, "train without --resume"),
        (lambda path: path.mkdir(), "train without --resume"),
        (lambda path: path.touch(), "it has no config.toml"),
        (lambda path: (path / "x").mkdir(parents=True), "it has no config.toml"),
    ],
    ids=["nothing", "an empty folder", "a file", "a folder of something else"],
)
def test_where_there_is_no_run_to_resume_the_cure_fits(
    minigen: Command, make: Callable[[Path], object], cure: str
) -> None:
    make(Path("run"))
    result = minigen("train", "--resume", "--out", "run")
    assert result == Result(1, "", f"Error: run holds no run to resume: {cure}\n")


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_a_step() -> None:
    one = Workers()
    with training.deferred_interrupts(one):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert one.asked_to_stop is True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    other = Workers()
    with training.deferred_interrupts(other):
        signal.raise_signal(signal.SIGINT)
        assert other.asked_to_stop


class Second(Workers):
    """The second of two workers, which ``together`` fails with the other or alone."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.rank, self.size, self.together = 1, 2, together
        self.aborted: list[int] = []

    def fail_together(self) -> bool:
        return self.together

    def abort(self, status: int) -> None:
        self.aborted.append(status)


def fail_as(worker: Workers, error: BaseException) -> None:
    with training.one_voice() as joined:
        assert joined is worker
        print("not its to say")
        print("nor this", file=sys.stderr)
        raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError("the disk is gone"), "the disk is gone"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_worker_speaks_only_where_it_fails_alone(
    error: BaseException,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for together, aborted in ((True, []), (False, [1])):
        second = Second(together=together)
        with monkeypatch.context() as patch:
            patch.setattr(workers, "from_mpiexec", lambda one=second: one)
            patch.setattr(sys, "stdout", sys.stdout)
            patch.setattr(sys, "stderr", sys.stderr)
            with pytest.raises(type(error)):
                fail_as(second, error)
            sys.stdout.close()
        said = "" if together else f"Error: worker 1 of 2: {told}\n"
        assert (second.aborted, *capsys.readouterr()) == (aborted, "", said)


# ---- --report


def test_a_report_that_cannot_be_made_is_refused_before_any_training(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require() -> Any:
        raise MinigenError("install it")

    monkeypatch.setattr(page, "require", require)
    for command in ("train", "demo"):
        result = minigen(command, *TINY_SETTINGS, "--report")
        assert result == Result(1, "", "Error: install it\n")
        assert not Path("runs").exists()
    assert minigen("train", *TINY_SETTINGS).status == 0
