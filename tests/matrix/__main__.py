"""`make matrix`: run the probe in every environment that can be built here; write the page."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from minigen.proof.sharing import fingerprints
from minigen.training.config import Config
from tests.matrix import page
from tests.matrix.groups import GROUPS, REPOSITORY, Environment, Skipped

ROWS = REPOSITORY / ".venv-matrix"  # a file for each group, of the last time that it ran
_LIMIT = 3600  # seconds, after which an environment counts as hung

Row = dict[str, Any]


def row_of(environment: Environment | Skipped) -> Row:
    """Run the probe in an environment, and say what came of it."""
    row: Row = {"name": environment.name}
    if isinstance(environment, Skipped):
        return row | {"skipped": environment.reason}
    try:
        done = environment.start(environment.names, _LIMIT)
    except subprocess.TimeoutExpired:
        return row | _fault(environment, f"took longer than {_LIMIT} seconds")
    except OSError as error:
        return row | {"skipped": str(error)}
    answer = re.search(r'^\{"environment".*\}$', done.stdout, re.MULTILINE)
    if done.returncode == 0 and answer:
        return row | json.loads(answer[0])
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if environment.refused and "cannot be kept here" in lines[-1]:
        return row | {"refused": lines[-1].partition(": ")[2]}
    if done.returncode < 0:
        return row | _fault(environment, f"was killed ({signal.Signals(-done.returncode).name})")
    return row | {"failed": lines[-1]}


def _fault(environment: Environment, what: str) -> Row:
    """Say what a process came to; where the same model in plain numpy does, it is not minigen's."""
    try:
        is_ours = environment.start(("floats",), _LIMIT).returncode >= 0
    except subprocess.TimeoutExpired:
        is_ours = False
    return {"failed": what} if is_ours else {"skipped": f"plain numpy, too: {what}"}


def measure(names: Sequence[str], jobs: int) -> None:
    """Run the probe in all environments of some groups; keep their rows."""

    def one(task: tuple[str, Environment | Skipped]) -> Row:
        row = row_of(task[1])
        state = next((key for key in ("skipped", "failed", "refused") if key in row), "")
        said = f"{state}: {row[state]}" if state else f"{row['seconds']} s"
        print(f"{task[0]:14s}{row['name']:50s}{said}", flush=True)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        running = {
            name: [pool.submit(one, (name, found)) for found in GROUPS[name]()] for name in names
        }
        for name, futures in running.items():
            rows: list[Row] = []
            for future in futures:
                rows.append(future.result())
                save(name, rows)


def save(group: str, rows: list[Row]) -> None:
    """Keep the rows of a group for later runs of others."""
    ROWS.mkdir(exist_ok=True)
    (ROWS / f"{group}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def load() -> dict[str, list[Row]]:
    """Return the rows of this run and of earlier ones: should those be old, they differ."""
    kept = {}
    for group in GROUPS:
        path = ROWS / f"{group}.json"
        with suppress(FileNotFoundError):
            try:
                rows = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(rows, list) or not all(map(page.is_row, rows)):
                    raise ValueError
                kept[group] = rows
            except ValueError:
                print(f"{path} holds no rows of this version: run {group} again", file=sys.stderr)
    return kept


def main() -> int:
    """Measure, write the page, and fail if a row differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if unknown := set(asked.groups) - GROUPS.keys():
        parser.error(
            f"no group is called {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}"
        )
    measure(asked.groups or [*GROUPS], asked.jobs)
    shared = fingerprints(Config.load("fables"))["fingerprint"]
    text, wrong = page.render(load(), shared)
    page.PATH.write_text(text, encoding="utf-8")
    print(f"wrote {page.PATH}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
