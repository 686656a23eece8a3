"""Whoever waits is told for what: by a bar whose clock goes on, or by a line."""

import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from minigen import cli
from minigen.cli import progress, proving, training
from minigen.proof import proving as experiments_in
from minigen.proof.laboratory import Claim, Control
from tests.conftest import TINY_SETTINGS, Result


def test_a_bars_clock_goes_on_while_nothing_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_TICK", 0.01)
    written = ""
    with progress.bar(True, "it begins", desc="waiting", total=3):
        while written.count("waiting: ") < 3:  # were it drawn once, this would wait for ever
            written += capsys.readouterr().err
            time.sleep(0.01)
    assert "it begins" not in written


def test_where_no_bar_is_shown_a_line_says_what_begins(capsys: pytest.CaptureFixture[str]) -> None:
    for choice in (False, None):  # no terminal listens
        with progress.bar(choice, "it begins", total=3) as shown:
            shown.update()
    assert capsys.readouterr().err == "it begins\n" * 2


def test_of_a_long_text_each_part_of_the_reading_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.reading_progress(False) as report:
        for phase in ("hashing", "encoding"):
            for size in (1000, (4 << 20) - 1, 4 << 20, 90_000_000):
                for done in (0, size // 2, size):
                    report(phase, done, size)
                report("", 0, 1)
    said = "hashing: 4 MB\nhashing: 90 MB\nencoding: 4 MB\nencoding: 90 MB\n"
    assert capsys.readouterr().err == said


def test_a_bar_of_the_reading_shows_the_bytes_of_each_part_and_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.reading_progress(True) as report:
        assert "reading: 0.00B [" in capsys.readouterr().err
        time.sleep(0.2)  # longer than between two drawings
        report("hashing", 30_000_000, 90_000_000)
        assert "hashing:  33%|" in (shown := capsys.readouterr().err)
        assert "| 30.0M/90.0M [" in shown
        time.sleep(0.2)
        report("encoding", 90_000_000, 90_000_000)
        assert "encoding: 100%|" in capsys.readouterr().err
    assert set(capsys.readouterr().err) == {"\r", " "}


def test_on_a_terminal_a_clock_says_what_is_under_way_and_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.clock("scoring"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.clock("scoring"):
        assert "\rscoring [00:00]" in capsys.readouterr().err
    assert set(capsys.readouterr().err) == {"\r", " "}


def test_on_a_terminal_whatever_takes_its_time_says_what_it_is(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(tiny_run)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        for command, *parts in (
            (["score", run, "a"], "\rscoring [00:00]"),
            (["evaluate", run], "\revaluating [00:00]"),
            (["diff", run, run], "\rcomparing [00:00]"),
            (["report", run, "--out", "page.html"], "\rmaking the page [00:00]"),
            (["train", *TINY_SETTINGS, "--out", str(is_terminal)], "\rreading: ", "\rtraining: "),
            (["verify", run], "\rreading: ", "\r100%|"),
        ):
            assert cli.run(command) == 0
            shown = capsys.readouterr().err
            assert [part in shown for part in parts] == [is_terminal] * len(parts), command


def test_whatever_reads_a_text_lets_it_be_followed(
    minigen: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    for module in (training, proving):
        monkeypatch.setattr(
            module, "reading_progress", lambda shows: nullcontext(lambda *_: calls.append(shows))
        )
    claim = Claim("a claim", True, "", Control("", True))
    monkeypatch.setattr(experiments_in, "EXPERIMENTS", (lambda _: claim,))
    Path("text.txt").write_text("to be or not to be")
    text = ["--text", "text.txt"]
    constant = ["--set", "optimizer.decay=constant"]
    for command in (
        ["train", *TINY_SETTINGS, *constant, *text, "--out", "run"],
        ["train", "--resume", "--out", "run", "--set", "training.steps=7"],
        ["verify", "run"],
        ["prove", *TINY_SETTINGS, *text],
    ):
        calls.clear()
        assert minigen(*command, "--progress").status == 0
        assert set(calls) == {True}, command


def test_notes_are_escaped_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal, shown in ((False, "\x1b"), (True, "\\x1b")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        progress.note("a\x1bb")
        with progress.notes_of_libraries():
            warnings.simplefilter("always")
            warnings.warn("c\x1b\nd", stacklevel=1)
        assert capsys.readouterr().err == f"a{shown}b\nWarning: c{shown} d\n"


def test_a_note_is_one_line_and_ends_no_work_whatever_python_makes_of_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for filter_ in ("error", "ignore"):
        with warnings.catch_warnings():
            warnings.simplefilter(filter_)
            with progress.notes_of_libraries():
                warnings.warn(f"a is odd ({filter_})", stacklevel=1)
        assert capsys.readouterr().err == f"Warning: a is odd ({filter_})\n"
    with progress.notes_of_libraries():
        warnings.warn("b\nfailed:\nTraceback (most recent call last):\n  File", stacklevel=1)
    assert capsys.readouterr().err == "Warning: b failed:\n"


def test_what_the_library_logs_is_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with progress.notes_of_libraries():
        logging.getLogger("minigen").info("compiling")
    logging.getLogger("minigen").info("nobody listens")
    assert capsys.readouterr().err == "compiling\n"
    assert cli.run(["train", *TINY_SETTINGS]) == 0
    assert "training: steps 1 to 6\n" in capsys.readouterr().err


def test_a_sweep_says_which_run_it_trains_and_a_verification_what(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "sweep")
    assert cli.run(["sweep", "--seeds", "0:2", "--out", out, *TINY_SETTINGS]) == 0
    assert "training seed=0\ntraining seed=1\n" in capsys.readouterr().err
    assert cli.run(["verify", f"{out}/seed=1"]) == 0
    assert "training 6 steps again\n" in capsys.readouterr().err
