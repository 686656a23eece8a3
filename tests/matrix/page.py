"""The page docs/environments.md, made of the rows that were measured."""
# ruff: noqa: E501  # the page's own lines are as wide as those of its neighbours

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.matrix import probe
from tests.matrix.groups import GROUPS, REPOSITORY

PATH = REPOSITORY / "docs/environments.md"
Rows = dict[str, list[dict[str, Any]]]

_SHORT = 10  # digits of a fingerprint on the page
_LIBRARIES = ("numpy", "scipy", "numba", "tokenizers", "safetensors", "pydantic")
_ENGINES = {"kernels_numba": "numba", "kernels": "numpy"}

_HEAD = """\
# Environments

[`make matrix`](../tests/matrix) made this page: it builds each environment below, starts the same
[probe](../tests/matrix/probe.py) in it, and compares what comes out. A row that differs is a bug, and makes the command
fail. What is promised, and why it holds, stands in [reproducibility.md](reproducibility.md).

{summary}

{contents}

| what is run | | fingerprint |
|---|---|---|
{reference}

In the tables, *equal* counts how many of these came out with the same bits, the text included. *Plain floats* is the
control: `fables` again, by the same model as everybody writes it, in float64
([`floats.py`](../minigen/proof/floats.py)). *Seconds* are the processor's time, of all threads and from the
start of the process; where numba had not compiled its loops before, that is in it.
"""

_TAIL = """\
## Add a row

Where your machine is not among these, run

    minigen prove --share

and paste the block that it ends with into an issue. It names versions, BLAS, processor and engine, and no person, host,
path or time. Its line `fingerprint` must be

    {shared}

which is that of the default config for 40 steps. If it is another one, or a claim fails, that is the bug to report. To
let the command build an environment that it does not know, add it to [`groups.py`](../tests/matrix/groups.py): a row is a
command that starts an interpreter, folders of packages, and variables. `make matrix GROUPS="kernels workers"` runs
some of the groups again and keeps the other rows (of this folder); what was downloaded and unpacked stays in
`~/.cache/minigen-matrix`. Debian's root folders need `apt-get` and `dpkg-deb`, the Python for musl `gcc`, `make` and
Debian's `autoconf`, `libtool` and `libltdl-dev`, JavaScript `node`, `npm` and `chromium`: what lacks is skipped, with the
reason.
"""

_WHAT = {
    "fables": "the fables, V = 1024, K = 2, D = 40, N = 512, 60 steps: learned vocabulary, AdamW",
    "names": "the config `names`, 60 steps",
    "sgd": "the same with SGD, 40 steps",
    "bytes": "the same with a vocabulary of bytes, 40 steps",
    "large": "the same with batches of 8192, 2 steps",
    "text": "two texts of the model `fables`, one sampled and one greedy: token ids",
}


def is_row(found: Any) -> bool:
    """Say whether something, out of a file perhaps, is a row as ``row_of`` makes it."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return False
    if "results" not in found:
        return any(isinstance(found.get(key), str) for key in ("skipped", "failed", "refused"))
    told, results, seconds = (found.get(key) for key in ("environment", "results", "seconds"))
    return (
        isinstance(told, dict)
        and all(isinstance(told.get(key), str) for key in ("python", "system", "engine"))
        and isinstance(results, dict)
        and any(name in probe.EXACT for name in results)
        and isinstance(seconds, int | float)
    )


def render(rows: Rows, shared: str) -> tuple[str, list[str]]:
    """Return the page, and a line for each row that differs or failed.

    ``shared`` is the fingerprint that `minigen prove --share` gives.
    """
    measured = [row for group in rows.values() for row in group if "results" in row]
    if not measured:
        return _HEAD, ["no row was measured"]
    reference = next(
        (row for row in measured if {*probe.EXACT} <= row["results"].keys()), measured[0]
    )
    right = reference["results"]
    wrong = list(_wrong(rows, right))
    floats = {row["results"]["floats"] for row in measured if "floats" in row["results"]}
    skipped = [(row, g) for g, group in rows.items() for row in group if "skipped" in row]
    agree = sum(not _differing(row, right) for row in measured)
    summary = (
        f"**{len(measured)} environments, {agree} with the same bits; plain floats give "
        f"{len(floats)} different fingerprints in them.** {len(skipped)} more could not be had "
        "([below](#what-could-not-be-had))."
    )
    listed = [
        f"| `{name}` | {what} | `{right[name][:_SHORT]}` |"
        for name, what in _WHAT.items()
        if name in right
    ]
    contents = _contents(rows, right)
    parts = [_HEAD.format(summary=summary, contents=contents, reference="\n".join(listed))]
    parts += [_table(name, group, right) for name, group in rows.items() if name != "refused"]
    parts += [_refused(rows.get("refused", []))]
    parts += ["## What could not be had\n\n" + _skipped(skipped)]
    parts += [_TAIL.format(shared=shared)]
    return "\n".join(parts), wrong


def _differing(row: dict[str, Any], right: dict[str, str]) -> list[str]:
    """Return the names of what differs in a row; plain floats may."""
    return [
        name
        for name, found in row["results"].items()
        if name in probe.EXACT and found != right.get(name)
    ]


def _wrong(rows: Rows, right: dict[str, str]) -> Iterator[str]:
    for group, of_group in rows.items():
        for row in of_group:
            if "failed" in row:
                yield f"{group}: {row['name']} failed: {row['failed']}"
            elif "results" in row and (differing := _differing(row, right)):
                yield f"{group}: {row['name']} differs in {', '.join(differing)}"
            elif group == "refused" and "results" in row:
                yield f"{group}: {row['name']} was not refused"


def _title(group: str) -> tuple[str, str]:
    """Return what a group's docstring says: its name, and more about it."""
    title, _, about = (GROUPS[group].__doc__ or "").strip().rstrip(".").partition(": ")
    return title, about


def _contents(rows: Rows, right: dict[str, str]) -> str:
    """Return a table of the groups: a link, and how many of its rows have the same bits."""
    lines = ["| group | environments | the same bits |", "|---|---|---|"]
    for group, of_group in rows.items():
        measured = [row for row in of_group if "results" in row]
        if measured:
            title = _title(group)[0]
            anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
            agree = sum(not _differing(row, right) for row in measured)
            lines.append(f"| [{title}](#{anchor}) | {len(measured)} | {agree} |")
    return "\n".join(lines)


def _table(group: str, rows: Sequence[dict[str, Any]], right: dict[str, str]) -> str:
    """Return a group as a table, above it what all its rows have in common."""
    title, about = _title(group)
    rows = [row for row in rows if "skipped" not in row]
    versions = [_versions(row) for row in rows if "environment" in row]
    common = {
        library: Counter(version.get(library, "") for version in versions).most_common(1)[0][0]
        for library in (versions[0] if versions else {})
    }
    lines = [f"## {title}", "", f"{about[:1].upper()}{about[1:]}." if about else ""]
    if common:
        told = ", ".join(f"{name} {version}" for name, version in common.items() if version)
        lines += ["", f"Where a row does not say otherwise: {told}."]
    lines += [
        "",
        "| environment | versions | engine | BLAS | seconds | fingerprint | equal | plain floats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row, common, right) for row in rows]
    return "\n".join(line for i, line in enumerate(lines) if line or lines[i - 1]) + "\n"


def _versions(row: dict[str, Any]) -> dict[str, str]:
    environment = row["environment"]
    if not environment["python"]:
        return {}
    python = environment["python"].removeprefix("CPython ")
    system = environment["system"].split(",")[0].removeprefix("Linux ")
    found = {"Python": python, "Linux": system}
    found |= {name: environment[name] for name in _LIBRARIES if environment.get(name)}
    return {name: "" if version == "absent" else version for name, version in found.items()}


def _line(row: dict[str, Any], common: dict[str, str], right: dict[str, str]) -> str:
    if "results" not in row:
        said = row.get("failed") or row.get("refused")
        return f"| {row['name']} | | | | | **{_cell(said)}** | | |"
    results, differing = row["results"], _differing(row, right)
    versions = ", ".join(
        f"{name} {version}" if version else f"no {name}"
        for name, version in _versions(row).items()
        if version != common.get(name)
    )
    first = next(name for name in results if name in probe.EXACT)
    said = f"`{results[first][:_SHORT]}`" + ("" if first == "fables" else f" ({first})")
    count = sum(name in probe.EXACT for name in results)
    equal = f"{count - len(differing)} of {count}"
    engine = row["environment"]["engine"]
    cells = (
        row["name"],
        versions,
        _ENGINES.get(engine, engine),
        _blas(row["environment"].get("blas", "")),
        f"{row['seconds']:.0f}",
        f"**{said}**" if differing else said,
        f"**{equal}: not {', '.join(differing)}**" if differing else equal,
        f"`{results['floats'][:6]}`" if "floats" in results else "",
    )
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _blas(told: str) -> str:
    """Shorten what ``sharing.environment`` says of numpy's BLAS and scipy's: "openblas Zen"."""
    names = {part.rpartition(", threads")[0] or part for part in told.split("; ")}
    versions: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        kind, _, rest = name.partition(" ")
        version, _, kernel = rest.partition(" ")
        versions.setdefault((kind, kernel), []).append(version)
    if told.startswith("none"):
        return told
    return "; ".join(f"{kind} {' and '.join(v)} {kernel}" for (kind, kernel), v in versions.items())


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _refused(rows: Sequence[dict[str, Any]]) -> str:
    """Say which machines are refused, and why; and what the one said that could be tried."""
    lines = [
        "## What is refused",
        "",
        "Every run starts with a self-check. Where a machine, or what was loaded, does not compute "
        "as IEEE 754 says, there is\nno run, and so no row: one line names the cause.",
        "",
        "| machine or process | why it is refused |",
        "|---|---|",
        "| 32-bit x86 whose floats are those of the x87, as Debian's i386 | results are rounded "
        "twice, to 64 bits and then to 53 |",
        "| a process in which something called `fesetround` | floats are not rounded to the "
        "nearest |",
        "| a process that loaded a library built with `-ffast-math` | subnormal numbers count as "
        "zero |",
        "| a BLAS that computes in single precision, or in parts of it | sums of integers below "
        "2⁵³ are not exact |",
        "",
    ]
    for row in rows:
        if "refused" in row:
            lines += [f"Tried: {row['name']}. It said: *{row['refused']}*.", ""]
    return "\n".join(lines)


def _skipped(skipped: Sequence[tuple[dict[str, Any], str]]) -> str:
    if not skipped:
        return "Nothing that is tried is missing.\n"
    lines = [f"| {row['name']} | {_cell(row['skipped'])} |" for row, _ in skipped]
    return "\n".join(["| environment | reason |", "|---|---|", *lines]) + "\n"
