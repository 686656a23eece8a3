"""Set bugs into the code, one at a time, and list those that the tests do not see.

`make mutants FILES="minigen/exact/*.py" SAMPLE=50 SEED=0`; with `STRICT=1` only the kinds of which
some may be missed are sampled, all others tried. Each bug is set into a copy of the repository,
where a fresh process runs the tests that run its line, and where they see nothing, all
tests of the room (not with `QUICK=1`); it is seen where one fails, or does not come to an end.
`AGAIN=1` tries those again that were not seen, and `NAMED=1` the bugs of `named.toml`: each has
been met or thought of, and the test that is named for it must see it.

It is a script of ours. Of the tools that are kept, mutmut 3 puts every function behind a switch,
which numba cannot compile and which the hash of the formulas would see; and cosmic-ray starts
Python with all of its libraries for every bug, where here a process that has them is forked.

`equivalent.toml` lists bugs that change nothing, with the reason. The results are kept in
`results.json`, file by file, and `RESULTS.md` is written from it.
"""

import argparse
import ast
import compileall
import importlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tests.mutants.changes import Change, lines_of, of_javascript, of_python

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
LIBRARIES = ("hypothesis", "pytest", "_pytest.assertion.rewrite", "numpy", "scipy.sparse", "click")
LIBRARIES += ("numba", "pydantic", "safetensors", "tokenizers", "tomli_w", "tqdm", "threadpoolctl")
FORMULAS = ("minigen/exact/arithmetic.py", "minigen/model/head.py", "minigen/model/rules.py")
"""What numba compiles: with a bug in it, it would compile all anew, so the tests run without."""
WHOLE_RUN = "tests/training/test_whole_run.py"
TESTS = {  # beside those of the room that a file is in, and of the source itself
    "minigen/exact": [
        "tests/exact",
        "tests/model",
        "tests/test_front.py",
        "tests/test_golden.py",
        "tests/report/test_vectors.py",
    ],
    "minigen/model": ["tests/model", "tests/test_golden.py", WHOLE_RUN],
    "minigen/text": ["tests/text"],
    "minigen/decoding": ["tests/decoding"],
    "minigen/decoding/candidates.py": ["tests/decoding", "tests/cli/test_options.py"],
    "minigen/decoding/generator.py": ["tests/decoding", "tests/cli/test_options.py"],
    "minigen/decoding/scoring.py": ["tests/decoding", "tests/cli/test_options.py"],
    "minigen/training": ["tests/training", "tests/test_golden.py"],
    **{  # each file's own, since those of the room take minutes
        f"minigen/training/{file}.py": [
            *(f"tests/training/test_{test}.py" for test in tests.split()),
            "tests/cli/test_training.py",
            "tests/test_front.py",
        ]
        for file, tests in {
            "checkpoint": "checkpoint hostile resume logs going_on",
            "config": "config going_on",
            "folder": "logs hostile ownership durability resume going_on run workers",
            "keys": "config going_on",
            "logs": "logs",
            "run": "run resume going_on whole_run workers",
            "sweep": "sweep",
            "pool": "workers sweep",
            "workers": "workers whole_run run",
        }.items()
    },
    "minigen/training/loading.py": ["tests/test_front.py", "tests/cli"],
    "minigen/proof": ["tests/proof"],
    "minigen/report": [
        "tests/report/test_vectors.py",
        "tests/report/test_twin.py",
        "tests/report/test_twin_training.py",
        "tests/report/test_report.py",
    ],
    "minigen/cli": ["tests/cli"],
    "minigen/cli/config.py": ["tests/cli", "tests/training/test_config.py"],
    "minigen/cli/demo.py": ["tests/cli", "tests/proof/test_demonstration.py"],
    "minigen/cli/difference.py": ["tests/cli", "tests/proof/test_difference.py"],
    "minigen/cli/progress.py": ["tests/cli", "tests/training/test_sweep.py"],
    "minigen/cli/proving.py": ["tests/cli", "tests/proof"],
    "minigen/cli/report.py": ["tests/cli", "tests/report/test_report.py"],
    "minigen/cli/sweep.py": [
        "tests/cli",
        "tests/training/test_sweep.py",
        "tests/training/test_ownership.py",
    ],
    "minigen/cli/training.py": ["tests/cli", "tests/training"],
    "minigen": ["tests/training", "tests/cli"],
    "minigen/__init__.py": ["tests/test_front.py"],
    "minigen/arguments.py": ["tests/test_arguments.py", "tests/decoding/test_generator.py"],
    "minigen/errors.py": ["tests/test_arguments.py"],
    "minigen/files.py": ["tests/test_files.py"],
    "minigen/paths.py": ["tests/test_files.py"],
    "minigen/signals.py": ["tests/test_files.py"],
}
SOURCE = "tests/test_architecture.py"
STRICT = ("comparison", "constant", "name", "exit status")
"""The kinds of bugs of which all are to be seen; of the others 95 of 100."""
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]
OPTIONS += ["--hypothesis-profile=minigen", "--no-cov", "-rfE"]
TIMES = 6.0  # a bug that lets the tests work so many times as long is seen


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
    parser.add_argument("--strict", action="store_true", help="and all of which none may be missed")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a file")
    parser.add_argument("--again", action="store_true", help="only what was not seen the last time")
    parser.add_argument("--quick", action="store_true", help="only the tests that run its line")
    parser.add_argument("--named", action="store_true", help="the bugs of named.toml")
    options = parser.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    _write_page()
    if options.named:
        _try_named(options.again)
        return
    for file in _files(options.files):
        _try(file, options)
        _write_page()


def _files(patterns: list[str]) -> list[str]:
    known = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "minigen").rglob("*")
        if path.suffix in (".py", ".js") and path.name != "page.js"
    )
    return [file for file in known if any(fnmatch(file, pattern) for pattern in patterns)]


def _try(file: str, options: argparse.Namespace) -> None:
    source = (ROOT / file).read_bytes()
    all_changes = of_javascript(source) if file.endswith(".js") else of_python(source)
    if not all_changes:  # as of a package's front
        return
    equivalent, last = _equivalent(file), _results().get(file)
    stale = equivalent - {(one.text, one.name) for one in all_changes}
    if stale:
        print(f"{file}: equivalent.toml lists what is no bug of it any more: {sorted(stale)}")
    changes = [one for one in all_changes if (one.text, one.name) not in equivalent]
    chosen = list(changes)
    random.Random(f"{options.seed} {file}").shuffle(chosen)
    if options.sample is not None:
        strict = [one for one in chosen if options.strict and one.kind in STRICT]
        chosen = strict + [one for one in chosen if one not in strict][: options.sample]
    if options.again:
        unseen = {(text, name) for _, name, text, _ in last["unseen"]} if last else set()
        chosen = [one for one in changes if (one.text, one.name) in unseen]
        if not chosen:
            if last:
                _keep(file, _mended(last, [], all_changes))
            return
    tests = options.tests or TESTS.get(file) or TESTS[str(Path(file).parent)]
    tests = _modules([*tests, SOURCE] if file.endswith(".py") else tests, file)
    if file in FORMULAS:  # a test that needs numba cannot even be read without it
        tests = [test for test in tests if test != WHOLE_RUN]
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        copies: Queue[Path] = Queue()
        for job in range(options.jobs):
            copies.put(_copy(Path(scratch) / str(job), file))
        copy = copies.get()
        covering, seconds = _covering(copy, file, tests)
        copies.put(copy)
        # What is run while a module is imported is run for every test, whichever came first.
        inside = _in_functions(source) if file.endswith(".py") else covering.keys()
        start = time.monotonic()
        print(
            f"{file}: {len(chosen)} of {len(all_changes)} bugs, tests {seconds:.0f} s of CPU",
            flush=True,
        )

        def attempt(change: Change) -> Outcome | None:
            if time.monotonic() - start > options.limit:
                return None
            copy = copies.get()
            try:
                narrow = _narrow(change, covering, file) if change.line in inside else []
                narrow = narrow or tests
                (copy / file).write_bytes(change.apply(source))
                seen, by = _run(copy, narrow, max(30.0, TIMES * seconds))
                # A line may be run by a fixture, or by a process of its own, for other tests, too.
                if not seen and narrow != tests and not options.quick:
                    seen, by = _run(copy, tests, max(30.0, TIMES * seconds))
                (copy / file).write_bytes(source)
            finally:
                copies.put(copy)
            told = f"{file}:{change.line}  {change.name}"
            if seen:
                print(f"  {told}  {by}", flush=True)
            else:
                print(f"  UNSEEN {told}\n      {change.text}", flush=True)
            return Outcome(change, seen, by)

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = [one for one in pool.map(attempt, chosen) if one is not None]
    seen = len([one for one in outcomes if one.seen])
    print(f"{file}: {seen} of {len(outcomes)} seen, {time.monotonic() - start:.0f} s", flush=True)
    if options.again:
        _keep(file, _mended(last, outcomes, all_changes))
        return
    kinds: dict[str, list[int]] = {}
    for one in outcomes:
        tried, known = kinds.get(one.change.kind, [0, 0])
        kinds[one.change.kind] = [tried + 1, known + one.seen]
    _keep(
        file,
        {
            "bugs": len(all_changes),
            "part": options.quick or options.tests is not None,
            "never_ended": len([one for one in outcomes if one.by == "time"]),
            "seconds": round(time.monotonic() - start),
            "kinds": dict(sorted(kinds.items())),
            "unseen": sorted(
                [one.change.line, one.change.name, one.change.text, one.change.kind]
                for one in outcomes
                if not one.seen
            ),
        },
    )


def _mended(
    last: dict[str, Any], outcomes: list[Outcome], all_changes: list[Change]
) -> dict[str, Any]:
    """The results of the last run, with what is seen since then, without what is no bug any more.

    A line that was unseen may be gone, or read otherwise now.
    """
    kinds = {kind: list(counts) for kind, counts in last["kinds"].items()}
    missed = {(one.change.text, one.change.name) for one in outcomes if not one.seen}
    found = {(one.change.text, one.change.name) for one in outcomes} - missed
    known, unseen = {(one.text, one.name) for one in all_changes}, []
    for line, name, text, kind in last["unseen"]:
        if (text, name) not in known:
            kinds[kind][0] -= 1
        elif (text, name) in found:
            kinds[kind][1] += 1
        else:
            unseen.append([line, name, text, kind])
    return last | {"kinds": kinds, "unseen": unseen}


def _results() -> dict[str, Any]:
    """Each file's results of its last run."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return {
        file: known[file] for file in sorted(known) if file == "named" or (ROOT / file).exists()
    }


def _keep(key: str, value: Any) -> None:
    results = _results() | {key: value}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _try_named(again: bool) -> None:
    """Try the bugs of named.toml: the tests that are named for each must see it."""
    bugs = tomllib.loads((HERE / "named.toml").read_text(encoding="utf-8"))["bug"]
    names = [bug["name"] for bug in bugs]
    last = {name: (seen, by) for name, seen, by in _results().get("named", []) if again and seen}
    bugs = [bug for bug in bugs if bug["name"] not in last]
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        plain = _copy(Path(scratch) / "with-numba", "")
        without = _copy(Path(scratch) / "without", FORMULAS[0])
        for copy, formulas in ((plain, False), (without, True)):
            tests = {
                test
                for bug in bugs
                if (bug["file"] in FORMULAS) == formulas
                for test in bug["tests"]
            }
            failed, message = _run(copy, sorted(tests), 900.0) if tests else (False, "")
            if failed:
                sys.exit(f"the tests of the named bugs fail without a bug:\n{message}")
        for bug in bugs:
            copy = without if bug["file"] in FORMULAS else plain
            source = (copy / bug["file"]).read_text(encoding="utf-8")
            if source.count(bug["old"]) != 1:
                sys.exit(f"{bug['name']}: {bug['file']} holds {bug['old']!r} not just once")
            _forget_compiled(copy / bug["file"])
            (copy / bug["file"]).write_text(source.replace(bug["old"], bug["new"]), "utf-8")
            seen, by = _run(copy, bug["tests"], 300.0)
            (copy / bug["file"]).write_text(source, "utf-8")
            print(f"  {'seen' if seen else 'UNSEEN'} {bug['name']}  {by}", flush=True)
            last[bug["name"]] = seen, by
    _keep("named", [[name, *last[name]] for name in names])
    _write_page()


def _write_page() -> None:
    """Write RESULTS.md; what was not seen and is since known to change nothing does not count."""
    results = _results()
    named = results.pop("named", [])
    for file, one in results.items():
        equivalent = _equivalent(file)
        nothing = [bug for bug in one["unseen"] if (bug[2], bug[1]) in equivalent]
        kinds = {kind: list(counts) for kind, counts in one["kinds"].items()}
        for bug in nothing:
            kinds[bug[3]][0] -= 1
        unseen = [bug for bug in one["unseen"] if bug not in nothing]
        results[file] = one | {"unseen": unseen, "kinds": kinds, "equivalent": len(equivalent)}
    (HERE / "RESULTS.md").write_text(_page(results, named), encoding="utf-8")


def _equivalent(file: str) -> set[tuple[str, str]]:
    entries = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8"))["equivalent"]
    listed = [one for one in entries if one["file"] == file]
    return {pair for one in listed for pair in product(lines_of(one), one["changes"])}


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
    for package in ("minigen", "tests"):  # else each process compiles all of them
        compileall.compile_dir(folder / package, quiet=1)
    _forget_compiled(folder / file)
    if file in FORMULAS:
        (folder / "numba.py").write_text(
            'raise ModuleNotFoundError("here all runs without numba")\n'
        )
    return folder


def _forget_compiled(file: Path) -> None:
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


class Coverage(NamedTuple):
    """Of a run without a bug: who runs which line, how long it took, and each of its tests."""

    found: Any
    copy: Path
    seconds: float
    times: dict[str, float]


_covered: dict[tuple[bool, bool, str], Coverage] = {}


def _covering(copy: Path, file: str, tests: list[str]) -> tuple[dict[int, list[str]], float]:
    """Run the tests without a bug: which of them run each line, the fastest first, and how long
    all take."""
    import coverage

    times: dict[str, float] = {}
    covering: dict[int, list[str]] = {}
    seconds = 0.0
    for path in tests:
        key = file in FORMULAS, file.endswith(".py"), path
        if key not in _covered:  # else another file has had them run
            start = sum(os.times()[2:4])  # of children: the processor's time
            cover = ["--cov=minigen", "--cov-context=test", "--cov-report="] if key[1] else []
            options = [option for option in OPTIONS if option != "--no-cov"]
            (copy / ".coverage").unlink(missing_ok=True)
            _, message = _run(copy, [path, *cover, "--junitxml=times.xml"], 1800.0, options)
            if message:
                sys.exit(f"{file}: the tests fail without a bug:\n{message}")
            found = coverage.CoverageData(no_disk=True)
            if (copy / ".coverage").exists():
                found.loads(coverage.CoverageData(str(copy / ".coverage")).dumps())
            taken = _times(copy / "times.xml")
            _covered[key] = Coverage(found, copy, sum(os.times()[2:4]) - start, taken)
        found, where, taken_in_all, taken = _covered[key]
        times |= taken
        seconds += taken_in_all
        for line, contexts in found.contexts_by_lineno(str(where / file)).items():
            runs = [name.removesuffix("|run") for name in contexts if name.endswith("|run")]
            covering.setdefault(line, []).extend(runs)
    modules: dict[str, list[float]] = {}
    for test, taken in times.items():
        modules.setdefault(test.partition("::")[0], []).append(taken)
    mean = {name: sum(all_of) / len(all_of) for name, all_of in modules.items()}
    for runs in covering.values():
        runs.sort(key=lambda test: (mean.get(test.partition("::")[0], 0.0), times.get(test, 0.0)))
    return covering, seconds


def _times(path: Path) -> dict[str, float]:
    """Seconds of each test, by the name that pytest calls it by."""
    cases = ElementTree.parse(path).iter("testcase")
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in cases
    }


def _narrow(change: Change, covering: dict[int, list[str]], file: str) -> list[str]:
    """The tests that run a line, its file's own first; none where too many do, or nobody knows."""
    runs = covering.get(change.line, [])
    return sorted(runs, key=lambda test: Path(file).stem not in test) if len(runs) < 400 else []


def _in_functions(source: bytes) -> set[int]:
    """The lines of a Python file that are run when a function is called."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    bodies = (range(one.body[0].lineno, (one.end_lineno or 0) + 1) for one in functions)
    return {line for body in bodies for line in body}


def _modules(tests: list[str], file: str) -> list[str]:
    """The test files of a room, a file's own first."""
    paths = [path for test in tests for path in sorted(ROOT.glob(f"{test}/**/test_*.py"))]
    names = [str(path.relative_to(ROOT)) for path in paths]
    names += [test for test in tests if test.endswith(".py")]
    return sorted(names, key=lambda name: Path(file).stem not in name)


def _run(
    copy: Path, tests: list[str], limit: float, options: list[str] = OPTIONS
) -> tuple[bool, str]:
    """Run tests in a forked process; whether they fail, and what they said then.

    ``limit`` is of the processor's seconds, of each process: a busy machine lets nothing end. What
    waits for nothing has ten times as long by the clock.
    """
    said = copy / "said.txt"
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit)))
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            os.environ["PYTHONPATH"] = str(copy)
            os.environ["PATIENCE"] = "100"
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
        except (Warning, ExceptionGroup):  # of files that nobody closed, as pytest ends
            status = 1
            said.write_text(traceback.format_exc(), encoding="utf-8")
        except BaseException:
            said.write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(status)
    deadline = time.monotonic() + max(300.0, 10.0 * limit)
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with suppress(ProcessLookupError):  # what a test that failed has left running
                os.killpg(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            if -code in (signal.SIGXCPU, signal.SIGKILL):
                return True, "time"
            text = said.read_text(encoding="utf-8") if said.exists() else ""
            if code not in (0, 1, 2, 4, 5) and code > 0:  # 4: what was named cannot be imported
                sys.exit(f"the tests cannot be run: {text}")
            is_seen = code not in (0, 5)  # 5: all were left out, as those of numba without it
            return is_seen, _first(text) if is_seen else ""
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True, "time"


def _first(said: str) -> str:
    """The test that failed, of what pytest said; else the end of it."""
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    return match[1] if match else "\n".join(said.split("\n")[-3:]).strip()[-300:]


def _page(results: dict[str, Any], named: list[tuple[str, bool, str]]) -> str:
    """RESULTS.md: tables of the kinds, rooms and files, and what was not seen."""
    kinds: dict[str, Counter[str]] = {}
    rooms: dict[str, Counter[str]] = {}
    for file, one in results.items():
        room = rooms.setdefault(str(Path(file).parent), Counter())
        room.update({key: one[key] for key in ("bugs", "equivalent")})
        for kind, (tried, seen) in one["kinds"].items():
            room.update(tried=tried, seen=seen)
            kinds.setdefault(kind, Counter()).update(tried=tried, seen=seen)
    lines = [
        "# Bugs that the tests see",
        "",
        "Made by `make mutants`. Each small bug was set into the code by itself; it is *seen*",
        "where a test of the same room fails. Bugs that change nothing do not count: they stand,",
        "with the reason, in `equivalent.toml`. *Tried* are all others, or a sample of them.",
        "",
        "| kind | tried | seen | score | wanted |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind, counts in sorted(kinds.items(), key=lambda item: (item[0] not in STRICT, item[0])):
        tried, seen, wanted = counts["tried"], counts["seen"], 100 if kind in STRICT else 95
        lines.append(f"| {kind} | {tried} | {seen} | {_score(counts)} | {wanted} % |")
    head = ["| bugs | change nothing | tried | seen | score |", "|--:|--:|--:|--:|--:|"]
    lines += ["", "| room " + head[0], "|---" + head[1]]
    total: Counter[str] = Counter()
    for name, counts in rooms.items():
        total.update(counts)
        lines.append(_table_row(f"`{name}`", counts))
    lines += [_table_row("together", total), "", "| file " + head[0], "|---" + head[1]]
    for file, one in results.items():
        tried, seen = (sum(counts[i] for counts in one["kinds"].values()) for i in (0, 1))
        mark = " *" if one["part"] else ""
        lines.append(_table_row(f"`{file}`{mark}", Counter(one | {"tried": tried, "seen": seen})))
    lines += [
        "",
        "Files without a row were not tried; of the others stands the last run. With a *, only",
        "some of the room's tests were asked: others may see what was not seen.",
        "",
        "## Not seen",
        "",
    ]
    for file, one in results.items():
        if one["unseen"]:
            lines += [f"`{file}`", ""]
            lines += [
                f"- line {line}, {kind}: `{name}` in `{text}`"
                for line, name, text, kind in one["unseen"]
            ]
            lines.append("")
    if named:
        lines += ["## Bugs by name", "", "Made by `make mutants NAMED=1` from `named.toml`.", ""]
        lines += ["| bug | seen by |", "|---|---|"]
        lines += [
            f"| {name} | {f'`{by}`' if seen else '**nothing**'} |" for name, seen, by in named
        ]
    return "\n".join(lines).rstrip() + "\n"


def _table_row(name: str, counts: Counter[str]) -> str:
    cells = [name, *(counts[key] for key in ("bugs", "equivalent", "tried", "seen"))]
    return f"| {' | '.join(map(str, [*cells, _score(counts)]))} |"


def _score(counts: Counter[str]) -> str:
    return f"{100.0 * counts['seen'] / counts['tried']:.1f} %" if counts["tried"] else "–"


if __name__ == "__main__":
    main()
