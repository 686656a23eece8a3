"""A small real file system that fills up while a run is written to it."""

import subprocess
from pathlib import Path

from tests.faults.campaign import TRAIN, Campaign, Reference

STEP = 8 << 10  # bytes of room more, from one try to the next
ENOUGH = 16 << 20


def _mount(folder: Path, size: int, *options: str) -> str:
    flags = ",".join([f"size={size}", *options])
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", flags, "minigen-faults", folder],
        capture_output=True,
        text=True,
    )
    return done.stderr.strip() if done.returncode else ""


def space(campaign: Campaign, reference: Reference) -> None:
    """Train where there is ever more room; then make room, and go on."""
    folder = campaign.fresh("small")
    folder.mkdir()
    try:
        refused = _mount(folder, STEP)
    except FileNotFoundError:
        refused = "there is no mount"
    if refused:
        campaign.skipped.append(
            f"a file system that fills up: it needs the rights of root ({refused})"
        )
        return
    subprocess.run(["umount", folder], check=True)
    size, status = STEP, 1
    while status:
        assert not _mount(folder, size)
        try:
            out = folder / "run"
            ended = campaign.run([*TRAIN, "--out", str(out)])
            status = ended.status
            what = f"a disk of {size} bytes"
            campaign.counts["full disks"] += 1
            campaign.expect_one_line(ended, what)
            campaign.expect(status in (0, 1), f"{what}: status {status}: {ended.err}")
            _mount(folder, ENOUGH, "remount")
            reference.finish(out, what)
        finally:
            subprocess.run(["umount", folder], check=True)
        size += STEP
