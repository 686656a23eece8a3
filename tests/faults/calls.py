"""Calls of the system that fail: the n-th write, fsync, rename or open, for every n."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from minigen import cli
from tests.faults.campaign import LONG, Campaign, Reference, train

SHORT = train({**LONG, "training.steps": 4, "checkpoint.every": 2})
CALLS = ("write", "fsync", "rename", "open")  # as shim.c counts them
ERRORS = {
    "write": [errno.EIO, errno.ENOSPC, 0],  # 0: a short one
    "fsync": [errno.EIO, errno.ENOSPC],
    "rename": [errno.EIO, errno.ENOSPC],
    "open": [errno.EIO, errno.ENOSPC],
}
FOREVER = 10**9
_SHIM = "MINIGEN_FAULT_SHIM"


def load_shim(folder: Path) -> str:
    """Start this process again with the shim before the C library; say why where it cannot be."""
    if _SHIM in os.environ:
        return ""
    if sys.platform != "linux":
        return "calls that fail: they are injected on Linux alone"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return "calls that fail: no C compiler (apt-get install gcc libc6-dev)"
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        return f"calls that fail: the shim does not compile: {built.stderr.splitlines()[0]}"
    environment = {**os.environ, "LD_PRELOAD": str(library), _SHIM: str(folder)}
    os.execve(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]], environment)


def calls(campaign: Campaign, _: Reference) -> None:
    """Let each call of a training and of a resumed one fail once, or from then on."""
    shim = ctypes.CDLL(None)
    reference = Reference(campaign, SHORT)
    half = campaign.fresh("half")  # as a kill in the middle leaves it
    shutil.copytree(reference.folder, half)
    (half / "step-000004.safetensors").unlink()

    def watched(command: Sequence[str], folder: Path, call: str, n: int, last: int, error: int):  # type: ignore[no-untyped-def]
        def work() -> int:
            shim.fault_watch(os.fsencode(folder), CALLS.index(call), n, last, error)
            status = cli.run([*command, "--out", str(folder)])
            print(*(shim.fault_count(i) for i in range(len(CALLS))))
            return status

        return campaign.run(work)

    for command in (SHORT, ["train", "--resume"]):

        def prepared(command: Sequence[str] = command) -> Path:
            folder = campaign.fresh("call")
            if command is not SHORT:
                shutil.copytree(half, folder)
            return folder

        ended = watched(command, prepared(), "write", FOREVER, FOREVER, 0)
        totals = dict(zip(CALLS, map(int, ended.out.split()[-len(CALLS) :]), strict=True))
        for call, total in totals.items():
            for n in range(1, total + 1):
                cases = [(n, error) for error in ERRORS[call]]
                cases += [(FOREVER, errno.ENOSPC)] if call in ("write", "open") else []
                for last, error in cases:
                    folder = prepared()
                    promised = reference.promises(folder)
                    ended = watched(command, folder, call, n, last, error)
                    campaign.counts["calls that failed"] += 1
                    name = os.strerror(error) if error else "short"
                    what = f"{command[1]}: {call} {n}{' and on' * (last > n)} of {total}: {name}"
                    campaign.expect_one_line(ended, what)
                    expected = (0, 1) if error else (0,)
                    campaign.expect(ended.status in expected, f"{what}: {ended.status} {ended.err}")
                    kept = reference.promises(folder)
                    campaign.expect(promised.items() <= kept.items(), f"{what}: a file was lost")
                    reference.finish(folder, what)
                    shutil.rmtree(folder, ignore_errors=True)
