"""The lists of bugs speak of the code as it is."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed(name: str) -> list[dict[str, str]]:
    (entries,) = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8")).values()
    return entries


def source(bug: dict[str, str]) -> str:
    return (ROOT / bug["file"]).read_text(encoding="utf-8")


def test_each_named_bug_can_be_set_in_at_just_one_place():
    stale = [bug["name"] for bug in listed("named.toml") if source(bug).count(bug["old"]) != 1]
    assert stale == []


def test_each_line_of_a_bug_that_changes_nothing_stands_in_its_file():
    stale = [
        (bug["file"], bug["line"])
        for bug in listed("equivalent.toml")
        if bug["line"] not in map(str.strip, source(bug).splitlines())
    ]
    assert stale == []
