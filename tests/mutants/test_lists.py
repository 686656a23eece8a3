"""The lists of bugs speak of the code as it is."""

import tomllib
from pathlib import Path
from typing import Any

from tests.mutants.changes import lines_of

ROOT = Path(__file__).parents[2]


def listed(name: str) -> list[dict[str, Any]]:
    (entries,) = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8")).values()
    return entries


def source(bug: dict[str, Any]) -> str:
    return (ROOT / bug["file"]).read_text(encoding="utf-8")


def test_each_named_bug_can_be_set_in_at_just_one_place():
    stale = [bug["name"] for bug in listed("named.toml") if source(bug).count(bug["old"]) != 1]
    assert stale == []


def test_each_line_of_a_bug_that_changes_nothing_stands_in_its_file():
    stale = [
        (bug["file"], line)
        for bug in listed("equivalent.toml")
        for line in lines_of(bug)
        if line not in map(str.strip, source(bug).splitlines())
    ]
    assert stale == []
