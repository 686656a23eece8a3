"""What the parts of the campaign share: a seeded draw, counts, and commands in forked processes.

The libraries are imported, and the loops compiled, once: each command runs in a fork of this
process, which is what makes hundreds of them affordable.
"""

import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from minigen import cli
from minigen.signals import STOP_SIGNALS
from tests.conftest import TINY

LONG = {**TINY, "training.steps": 12, "checkpoint.every": 3, "optimizer.decay": "constant"}


def train(settings: dict[str, object]) -> list[str]:
    """Return the command that trains the default config with some settings."""
    parts = (("--set", f"{key}={value}") for key, value in settings.items())
    return ["train", *(part for pair in parts for part in pair)]


TRAIN = train(LONG)
EXTRA_SAVE = re.compile(r"step-\d{6}\.safetensors")  # what an interruption saves between
PATIENCE = 120.0  # seconds after which a command counts as hung


class Ended(NamedTuple):
    """A command that has ended: its status (−n for signal n), stdout and stderr."""

    status: int
    out: str
    err: str


class Process:
    """A command, or a function that returns a status, in a fork of this process."""

    def __init__(self, work: Sequence[str] | Callable[[], int], files: Path) -> None:
        self._files = files
        self._status: int | None = None
        sys.stdout.flush()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._outlets = [os.open(f"{files}.{name}", flags) for name in ("out", "err")]
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            self._be(work)
        for outlet in self._outlets:
            os.close(outlet)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _be(self, work: Sequence[str] | Callable[[], int]) -> None:
        status = 70
        try:
            os.setsid()
            for number, outlet in enumerate(self._outlets, start=1):
                os.dup2(outlet, number)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            for stop in STOP_SIGNALS:
                signal.signal(stop, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            status = work() if callable(work) else cli.run(list(work))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def has_ended(self) -> bool:
        """Whether it has; without waiting."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is not None

    def wait(self) -> Ended:
        """Wait for the end, and kill what hangs."""
        deadline = time.monotonic() + PATIENCE
        while not self.has_ended():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        assert self._status is not None
        out, err = (Path(f"{self._files}.{n}").read_text(errors="replace") for n in ("out", "err"))
        return Ended(self._status, out, err)


class Campaign:
    """A seeded draw, a folder to work in, counts of what was done, and what did not hold."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self._numbers = 0

    def fresh(self, name: str) -> Path:
        """Return a path in the campaign's folder where nothing is yet."""
        self._numbers += 1
        return self.folder / f"{name}-{self._numbers}"

    def expect(self, holds: bool, what: str) -> bool:
        """Note a failure unless it holds."""
        if not holds:
            self.failures.append(what)
            print(f"FAILED: {what}", flush=True)
        return holds

    def run(self, work: Sequence[str] | Callable[[], int]) -> Ended:
        """Run a command to its end, undisturbed."""
        return Process(work, self.fresh("said")).wait()

    def expect_one_line(self, ended: Ended, what: str) -> None:
        """A command that did not end well says why in one line, and shows no traceback."""
        lines = [line for line in ended.err.split("\n") if line.startswith("Error: ")]
        self.expect("Traceback" not in ended.err, f"{what}: a traceback:\n{ended.err}")
        if ended.status == 1:
            self.expect(len(lines) == 1, f"{what}: {len(lines)} lines of error:\n{ended.err}")
            self.expect("unexpected" not in ended.err, f"{what}: {ended.err}")


class Reference:
    """A run that nothing disturbed: what a disturbed one must come to in the end."""

    def __init__(self, campaign: Campaign, command: list[str] = TRAIN) -> None:
        self._campaign, self.command = campaign, command
        self.folder = campaign.fresh("undisturbed")
        start = time.monotonic()
        ended = campaign.run([*command, "--out", str(self.folder)])
        self.seconds = time.monotonic() - start
        assert ended.status == 0, ended.err
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        del self.files["timing.jsonl"]

    def promises(self, folder: Path) -> dict[str, bytes]:
        """Return the checkpoints in a folder; the logs must reach up to the last of them."""
        if not folder.is_dir():
            return {}
        saved = {p.name: p.read_bytes() for p in folder.iterdir() if EXTRA_SAVE.fullmatch(p.name)}
        step = max((int(name[5:11]) for name in saved), default=0)
        if step:
            lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            expected = self.files["metrics.jsonl"].splitlines(keepends=True)
            self._campaign.expect(lines[:step] == expected[:step], f"{folder}: metrics are missing")
        return saved

    def finish(self, folder: Path, what: str) -> None:
        """Take up what was left, to the end: the same files, nothing lost, no stray."""
        expect = self._campaign.expect
        promised = self.promises(folder)
        ended = self._campaign.run(["train", "--resume", "--out", str(folder)])
        if ended.status and not promised:  # killed before there was anything to go on with
            ended = self._campaign.run([*self.command, "--out", str(folder)])
        if not expect(ended.status == 0, f"{what}: it does not go on: {ended.err}"):
            return
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for name, data in {**promised, **self.files}.items():
            expect(found.get(name) == data, f"{what}: {name} is not what it was to be")
        odd = [n for n in found.keys() - self.files.keys() if not EXTRA_SAVE.fullmatch(n)]
        odd = [n for n in odd if n != "timing.jsonl" and not n.endswith(".lock")]
        expect(not odd, f"{what}: left behind: {odd}")
