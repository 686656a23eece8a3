"""Set bugs into the code, one at a time, and list those that the tests do not see.

`make mutants FILES="minigen/exact/*.py" SAMPLE=50 SEED=0`. Each bug is set into a copy of the
repository, where a fresh process runs the tests that run its line; it is seen where one fails, or
does not come to an end.

It is a script of ours. Of the tools that are kept, mutmut 3 puts every function behind a switch,
which numba cannot compile and which the hash of the formulas would see; and cosmic-ray starts
Python with all of its libraries for every bug, where here a process that has them is forked.

`equivalent.toml` lists bugs that change nothing, with the reason. The results are kept in
`results.json`, file by file, and `RESULTS.md` is written from it.
"""

import argparse
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from tests.mutants.changes import Change, of_javascript, of_python

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
LIBRARIES = ("hypothesis", "pytest", "_pytest.assertion.rewrite", "numpy", "scipy.sparse", "click")
LIBRARIES += ("numba", "pydantic", "safetensors", "tokenizers", "tomli_w", "tqdm", "threadpoolctl")
FORMULAS = ("minigen/exact/arithmetic.py", "minigen/model/head.py", "minigen/model/rules.py")
"""What numba compiles: with a bug in it, it would compile all anew, so the tests run without."""
WHOLE_RUN = "tests/training/test_whole_run.py"
TESTS = {  # beside those of the room that a file is in
    "minigen/exact": ["tests/exact", "tests/model"],
    "minigen/model": ["tests/model", "tests/test_golden.py", WHOLE_RUN],
    "minigen/text": ["tests/text"],
    "minigen/decoding": ["tests/decoding"],
    "minigen/training": ["tests/training", "tests/test_golden.py"],
    "minigen/proof": ["tests/proof"],
    "minigen/report": [
        "tests/report/test_twin.py",
        "tests/report/test_twin_training.py",
        "tests/report/test_vectors.py",
        "tests/report/test_report.py",
    ],
    "minigen/cli": ["tests/cli"],
    "minigen": ["tests/training", "tests/cli"],
}
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]
OPTIONS += ["--hypothesis-profile=minigen", "--no-cov"]
TIMES = 6.0  # a bug that lets the tests take so many times as long is seen


class Outcome(NamedTuple):
    """What came of a bug: whether it was seen, and by which test."""

    change: Change
    seen: bool
    by: str


def main() -> None:
    """Try the bugs of the files that were named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=["minigen/exact/*.py"])
    parser.add_argument("--tests", nargs="*", help="run these alone, in place of the room's")
    parser.add_argument("--sample", type=int, help="try so many bugs of each file, drawn")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a file")
    options = parser.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    _write_page()
    for file in _files(options.files):
        _try(file, options)
        _write_page()


def _files(patterns: list[str]) -> list[str]:
    known = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "minigen").rglob("*")
        if path.suffix in (".py", ".js") and path.name not in ("page.js", "__init__.py")
    )
    return [file for file in known if any(fnmatch(file, pattern) for pattern in patterns)]


def _try(file: str, options: argparse.Namespace) -> None:
    source = (ROOT / file).read_bytes()
    all_changes = of_javascript(source) if file.endswith(".js") else of_python(source)
    equivalent = _equivalent(file)
    changes = [one for one in all_changes if (one.text, one.name) not in equivalent]
    chosen = list(changes)
    random.Random(f"{options.seed} {file}").shuffle(chosen)
    chosen = chosen[: options.sample] if options.sample else chosen
    tests = options.tests or TESTS[str(Path(file).parent)]
    if file in FORMULAS:  # a test that needs numba cannot even be read without it
        tests = [test for test in tests if test != WHOLE_RUN]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies: Queue[Path] = Queue()
        for job in range(options.jobs):
            copies.put(_copy(Path(scratch) / str(job), file))
        copy = copies.get()
        covering, seconds, message = _covering(copy, file, tests)
        copies.put(copy)
        if message:
            sys.exit(f"{file}: the tests fail without a bug:\n{message}")
        print(
            f"{file}: {len(chosen)} of {len(all_changes)} bugs, tests {seconds:.0f} s", flush=True
        )

        def attempt(change: Change) -> Outcome | None:
            if time.monotonic() - start > options.limit:
                return None
            copy = copies.get()
            try:
                narrow = _narrow(change, covering, tests, file)
                (copy / file).write_bytes(change.apply(source))
                seen, by = _run(copy, narrow, max(30.0, TIMES * seconds))
                (copy / file).write_bytes(source)
            finally:
                copies.put(copy)
            if not seen:
                print(
                    f"  unseen {file}:{change.line}  {change.name}\n      {change.text}", flush=True
                )
            return Outcome(change, seen, by)

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = [one for one in pool.map(attempt, chosen) if one is not None]
    seen = len([one for one in outcomes if one.seen])
    print(f"{file}: {seen} of {len(outcomes)} seen, {time.monotonic() - start:.0f} s", flush=True)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results[file] = {
        "bugs": len(all_changes),
        "equivalent": len(all_changes) - len(changes),
        "tried": len(outcomes),
        "seen": seen,
        "never_ended": len([one for one in outcomes if one.by == "time"]),
        "seconds": round(time.monotonic() - start),
        "unseen": sorted(
            [one.change.line, one.change.name, one.change.text] for one in outcomes if not one.seen
        ),
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_page() -> None:
    """Write RESULTS.md; what was not seen and is since known to change nothing does not count."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    known = {name: results[name] for name in sorted(results) if (ROOT / name).exists()}
    for file, one in known.items():
        equivalent = _equivalent(file)
        unseen = [bug for bug in one["unseen"] if (bug[2], bug[1]) not in equivalent]
        nothing = len(equivalent)
        tried = one["tried"] - len(one["unseen"]) + len(unseen)
        known[file] = one | {"unseen": unseen, "tried": tried, "equivalent": nothing}
    (HERE / "RESULTS.md").write_text(_page(known), encoding="utf-8")


def _equivalent(file: str) -> set[tuple[str, str]]:
    entries = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8"))["equivalent"]
    listed = [one for one in entries if one["file"] == file]
    return {(one["line"], change) for one in listed for change in one["changes"]}


def _copy(folder: Path, file: str) -> Path:
    """A copy of what git knows and of what is new, without numba for some files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target)
    if file in FORMULAS:
        (folder / "numba.py").write_text(
            'raise ModuleNotFoundError("here all runs without numba")\n'
        )
    return folder


_covered: dict[tuple[bool, bool, tuple[str, ...]], tuple[Any, Path, float, str]] = {}


def _covering(copy: Path, file: str, tests: list[str]) -> tuple[dict[int, list[str]], float, str]:
    """Run the tests without a bug: which of them run each line, and how long all take."""
    key = file in FORMULAS, file.endswith(".py"), tuple(tests)
    if key not in _covered:  # else another file of the same room has had them run
        import coverage

        start = time.monotonic()
        cover = ["--cov=minigen", "--cov-context=test", "--cov-report="]
        options = [option for option in OPTIONS if option != "--no-cov"]
        _, message = _run(copy, [*tests, *(cover if key[1] else [])], 900.0, options)
        found = coverage.CoverageData(no_disk=True)
        if (copy / ".coverage").exists():
            found.loads(coverage.CoverageData(str(copy / ".coverage")).dumps())
        _covered[key] = found, copy, time.monotonic() - start, message
    found, where, seconds, message = _covered[key]
    covering = {
        line: [name.removesuffix("|run") for name in contexts if name.endswith("|run")]
        for line, contexts in found.contexts_by_lineno(str(where / file)).items()
    }
    return covering, seconds, message


def _narrow(
    change: Change, covering: dict[int, list[str]], tests: list[str], file: str
) -> list[str]:
    """The tests that run a line; all of them where it is run while it is imported."""
    runs = covering.get(change.line, [])
    own = [name for name in runs if Path(file).stem in name]
    others = [name for name in runs if name not in own]
    return [*own, *others] if runs and len(runs) < 400 else tests


def _run(
    copy: Path, tests: list[str], limit: float, options: list[str] = OPTIONS
) -> tuple[bool, str]:
    """Run tests in a forked process; whether they fail, and what they said then."""
    said = copy / "said.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 70
        try:
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            os.environ["PYTHONPATH"] = str(copy)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            for name in [
                name for name in sys.modules if name.split(".")[0] in ("tests", "minigen")
            ]:
                del sys.modules[name]
            sys.dont_write_bytecode = True
            if (copy / "numba.py").exists():
                for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
                    del sys.modules[name]
            import pytest

            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(out):
                status = int(pytest.main([*options, f"--basetemp={copy}/tmp", *tests]))
            said.write_text(out.getvalue()[-4000:], encoding="utf-8")
        except BaseException:
            said.write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            text = said.read_text(encoding="utf-8") if said.exists() else ""
            if code not in (0, 1, 2, 4) and code > 0:  # 4: what was named cannot be imported
                sys.exit(f"the tests cannot be run: {text}")
            return code != 0, text if code else ""
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True, "time"


def _page(results: dict[str, Any]) -> str:
    """RESULTS.md: a table of the files, and what was not seen."""
    lines = [
        "# Bugs that the tests see",
        "",
        "Made by `make mutants`. Each small bug was set into the code by itself; it is *seen*",
        "where a test of the same room fails. Bugs that change nothing do not count: they stand,",
        "with the reason, in `equivalent.toml`. *Tried* are all others, or a sample of them.",
        "",
        "| file | bugs | change nothing | tried | seen | score |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    total = dict.fromkeys(("bugs", "equivalent", "tried", "seen"), 0)
    for file, one in results.items():
        for key in total:
            total[key] += one[key]
        lines.append(_table_row(f"`{file}`", one))
    lines += [_table_row("together", total), ""]
    lines += [
        "Files without a row were not tried; of the others stands the last run.",
        "",
        "## Not seen",
        "",
    ]
    for file, one in results.items():
        if one["unseen"]:
            lines += [f"`{file}`", ""]
            lines += [f"- line {line}: `{name}` in `{text}`" for line, name, text in one["unseen"]]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table_row(name: str, one: dict[str, int]) -> str:
    score = f"{100.0 * one['seen'] / one['tried']:.1f} %" if one["tried"] else "–"
    cells = [name, *(one[key] for key in ("bugs", "equivalent", "tried", "seen")), score]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
