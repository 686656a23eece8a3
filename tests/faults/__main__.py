"""`make test-faults`: the whole campaign, or the named parts of it."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from minigen.training.config import Config
from minigen.training.run import Run
from tests.faults.calls import calls, load_shim
from tests.faults.campaign import LONG, Campaign, Reference
from tests.faults.damage import damage
from tests.faults.inputs import inputs
from tests.faults.kills import kills
from tests.faults.space import space

PARTS = {"kills": kills, "calls": calls, "space": space, "damage": damage, "inputs": inputs}


def main() -> int:
    """Run it; return 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if odd := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(odd)}: there are {', '.join(PARTS)}")
    parts = arguments.parts or list(PARTS)
    memory = "/dev/shm"  # where there is a disk in memory, nothing waits for a real one
    where = memory if os.access(memory, os.W_OK) else None
    made = os.environ.get("MINIGEN_FAULT_SHIM") or tempfile.mkdtemp("", "minigen-faults-", where)
    folder = Path(made)
    campaign = Campaign(arguments.seed, folder)
    try:
        if "calls" in parts and (reason := load_shim(folder)):
            campaign.skipped.append(reason)
            parts.remove("calls")
        os.environ["MINIGEN_CACHE"] = str(folder / "cache")
        Run(Config.load("fables", LONG)).train(1)  # compiles the loops, for all forks
        reference = Reference(campaign)
        for part in parts:
            start, failures = time.monotonic(), len(campaign.failures)
            work = PARTS[part]
            work(campaign) if work in (damage, inputs) else work(campaign, reference)  # type: ignore[call-arg,arg-type]
            wrong = len(campaign.failures) - failures
            print(f"{part}: {time.monotonic() - start:.0f} s, {wrong} failures", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for reason in campaign.skipped:
        print(f"skipped: {reason}")
    done = ", ".join(f"{count:,} {what}" for what, count in campaign.counts.items())
    print(f"seed {arguments.seed}: {done}; {len(campaign.failures)} failures")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
