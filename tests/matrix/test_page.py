"""The page of environments: what counts as the same, and that the published one is whole."""

import re

import pytest

from tests.matrix import __main__, page, probe
from tests.matrix.__main__ import row_of
from tests.matrix.groups import Environment, Skipped


def row(name, **changed):
    results = {one: f"{one:0<64}" for one in probe.NAMES} | changed
    told = {"python": "CPython 3.11.7", "system": "Linux x86_64, glibc", "engine": "kernels"}
    return {"name": name, "environment": told, "results": results, "seconds": 1.0}


@pytest.mark.parametrize("differing", probe.EXACT)
def test_a_row_that_differs_is_named_and_is_a_failure(differing):
    text, wrong = page.render({"company": [row("usual"), row("odd", **{differing: "0"})]}, "")
    assert wrong == [f"company: odd differs in {differing}"]
    assert f"not {differing}" in text
    assert "2 environments, 1 with the same bits" in text


def test_plain_floats_may_differ_and_are_counted():
    text, wrong = page.render({"company": [row("usual"), row("odd", floats="0")]}, "")
    assert not wrong
    assert "plain floats give 2 different fingerprints" in text


def test_what_failed_is_a_failure_and_what_cannot_be_had_has_its_reason():
    rows = [row("usual"), {"name": "a", "failed": "crashed"}, {"name": "b", "skipped": "no wheel"}]
    text, wrong = page.render({"company": rows}, "")
    assert wrong == ["company: a failed: crashed"]
    assert "| b | no wheel |" in text


def test_a_machine_that_must_be_refused_and_is_not_is_a_failure():
    _, wrong = page.render({"company": [row("usual")], "refused": [row("x87")]}, "")
    assert wrong == ["refused: x87 was not refused"]


def test_an_environment_that_ends_badly_is_no_row_of_results(tmp_path):
    script = tmp_path / "ends.sh"
    script.write_text("echo the reason >&2; exit 3")
    ending = Environment("ends", ["sh"], flags=(), program=[str(script)])
    assert row_of(ending) == {"name": "ends", "failed": "the reason"}
    assert row_of(Skipped("lacks", "no wheel")) == {"name": "lacks", "skipped": "no wheel"}


_NO_ROWS = (
    "3",
    "null",
    "[3]",
    '[{"name": 1}]',
    '[{"name": "a"}]',
    '[{"name": "a", "results": {}}]',
)


@pytest.mark.parametrize("text", ["", "[", "{}", *_NO_ROWS])
def test_rows_of_another_version_are_named_and_left_out(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(__main__, "ROWS", tmp_path)
    __main__.save("workers", [row("usual")])
    (tmp_path / "company.json").write_text(text)
    assert __main__.load() == {"workers": [row("usual")]}
    assert "company.json holds no rows of this version" in capsys.readouterr().err


def test_the_published_page_lists_environments_that_all_agree():
    text = page.PATH.read_text(encoding="utf-8")
    count, agree = map(int, re.search(r"\*\*(\d+) environments, (\d+) with", text).groups())
    rows = re.findall(r"^\| .* \| (\d+) of (\d+) \|", text, re.MULTILINE)
    assert count == agree == len(rows) >= 100
    assert all(same == of for same, of in rows)
