"""How text enters the commands and how it leaves them, whatever its line ends and characters."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minigen.cli.generating import _print_json_lines, in_order
from minigen.cli.outlets import visible
from minigen.decoding.generation import Continuation, Piece
from tests.conftest import PATIENCE, TINY_SETTINGS, Result

Command = Callable[..., Result]
MINIGEN = [sys.executable, "-m", "minigen"]


@pytest.fixture
def with_input(minigen: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command with these bytes as its standard input; return its output."""

    def call(data: bytes, *arguments: str) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        result = minigen(*arguments)
        assert (result.status, result.err) == (0, "")
        return result.out

    return call


# ---- Text enters


@pytest.mark.parametrize(
    "data", [b"Once", b"Once\n", b"Once\r\n", b"Once\r\r\n", b"Once\r", b"\xef\xbb\xbfOnce\r\n"]
)
def test_what_is_read_has_no_byte_order_mark_and_no_last_line_end(
    with_input: Callable[..., str], tiny_run: Path, data: bytes
) -> None:
    run = str(tiny_run)
    Path("once.txt").write_bytes(data)
    write = ("generate", run, "--max-new-tokens", "3", "--json")
    expected = with_input(b"", *write, "Once")
    for how in (["-"], ["--prompts", "-"], ["--prompts", "once.txt"]):
        assert with_input(data, *write, *how) == expected
    expected = with_input(b"", "score", run, "Once")
    for how in (["-"], ["--file", "-"], ["--file", "once.txt"]):
        assert with_input(data, "score", run, *how) == expected
    assert with_input(data, "next", run, "-") == with_input(b"", "next", run, "Once")


def test_only_one_line_end_is_taken_off_and_no_space(minigen: Command, tiny_run: Path) -> None:
    Path("text.txt").write_bytes(b"a\r\n \n\n")
    result = json.loads(minigen("score", str(tiny_run), "--file", "text.txt", "--json").out)
    assert bytes(result["token_ids"]) == b"a\r\n \n"


def test_prompts_are_lines_however_they_end(minigen: Command, tiny_run: Path) -> None:
    Path("prompts.txt").write_bytes(b"\xef\xbb\xbfa\r\n\nb\rc\r\r\nd")
    options = ("--prompts", "prompts.txt", "--max-new-tokens", "1", "--json")
    lines = minigen("generate", str(tiny_run), *options).out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["a", "", "b", "c", "d"]


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_gives_no_text_and_says_so(
    minigen: Command, tiny_run: Path, data: bytes
) -> None:
    Path("prompts.txt").write_bytes(data)
    result = minigen("generate", str(tiny_run), "--prompts", "prompts.txt")
    assert result == Result(0, "", "prompts.txt holds no prompt, so there is no text\n")


def test_evaluate_says_that_line_ends_between_documents_are_not_counted(minigen: Command) -> None:
    Path("lines.txt").write_text("a\nb\n" * 3)
    lines = ("--set", "corpus.documents=line", "--text", "lines.txt")
    assert minigen("train", *TINY_SETTINGS, *lines, "--out", "run").status == 0
    out = minigen("evaluate", "run", "--text", "lines.txt").out
    assert "over 6 bytes of documents, without the line ends between them\n" in out


# ---- Text leaves


def test_a_character_split_between_prompt_and_continuation_comes_out_once(
    with_input: Callable[..., str], tiny_run: Path
) -> None:
    only = [f"--suppress-token={token}" for token in range(257) if token != 0x9D]
    arguments = ["generate", str(tiny_run), "-", "--max-new-tokens", "1", *only]
    assert with_input(b"so \xe2\x80\n", *arguments) == "so ”\n"
    assert '"text": "”", ' in with_input(b"so \xe2\x80\n", *arguments, "--json")


def test_a_character_that_stays_incomplete_is_replaced_once(
    with_input: Callable[..., str], tiny_run: Path
) -> None:
    only = [f"--suppress-token={token}" for token in range(257) if token != ord("a")]
    arguments = ["generate", str(tiny_run), "-", "--max-new-tokens", "2", *only]
    assert with_input(b"so \xe2\x80\n", *arguments) == "so \ufffdaa\n"


def test_neither_a_stop_string_nor_end_of_text_ends_a_text_before_its_minimum(
    minigen: Command, tiny_run: Path
) -> None:
    only = [f"--suppress-token={token}" for token in range(257) if token != ord(".")]
    for how in ((), ("--greedy",), ("--draft", str(tiny_run)), ("--num-beams", "2")):
        options = ("--min-new-tokens", "10", "--stop", ".", *only, *how, "--json")
        line = json.loads(minigen("generate", str(tiny_run), "a", *options).out)
        assert (line["text"], len(line["token_ids"])) == ("." * 9, 10)
        assert line["finish_reason"] == "stop"


BESIDE_THE_POINT = {
    "a length penalty without beams": (["--length-penalty", "2"], "give --num-beams"),
    "draft tokens without a draft": (["--num-draft-tokens", "3"], "give --draft"),
    "a seed for beams": (["--num-beams", "2", "--seed", "0"], "got --seed"),
    "greedy beams": (["--num-beams", "2", "--greedy"], "got --greedy"),
    "a draft for beams": (["--num-beams", "2", "--draft", "x"], "got --draft"),
    "greedy samples": (["--greedy", "--num-samples", "2"], "no second sample"),
    "samples at temperature 0": (["--temperature", "0", "--num-samples", "2"], "no second sample"),
    "samples of one": (["--top-k", "1", "--num-samples", "2"], "no second sample"),
}


@pytest.mark.parametrize("mistake", BESIDE_THE_POINT)
def test_an_option_that_would_change_nothing_is_refused(minigen: Command, mistake: str) -> None:
    options, message = BESIDE_THE_POINT[mistake]
    result = minigen("generate", "missing", "a", *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_an_option_that_only_says_what_is_so_is_no_mistake(
    minigen: Command, tiny_run: Path
) -> None:
    one = ["--num-samples", "1", "--max-new-tokens", "2"]
    for options in (["--greedy", *one], ["--num-beams", "2", *one], ["--draft", str(tiny_run)]):
        assert minigen("generate", str(tiny_run), "a", *options).status == 0


@pytest.mark.parametrize(
    "clause",
    [
        "occurred, in the prompt too",
        "Equal prompts get equal texts",
        "taken literally",
        "by a stop string either",
        "--logit-bias ID=BIAS ",
    ],
)
def test_help_says_what_behaviour_is(minigen: Command, clause: str) -> None:
    assert clause in " ".join(minigen("generate", "--help").out.split())


def on_a_terminal(*arguments: str, which: str) -> bytes:
    """What a command writes to stdout or stderr, which is a terminal."""
    outer, inner = pty.openpty()
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {which: inner}
    process = subprocess.Popen([*MINIGEN, *arguments], stdin=subprocess.DEVNULL, **streams)
    os.close(inner)
    shown = b""
    try:
        while part := os.read(outer, 1 << 16):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    process.wait(60)
    os.close(outer)
    return shown


def test_what_would_command_a_terminal_is_escaped_there_and_raw_elsewhere(tiny_run: Path) -> None:
    prompt = "a\x1b[2J\u202eb\x9b\tc"
    arguments = ("generate", str(tiny_run), prompt, "--max-new-tokens", "1", "--greedy")
    shown = on_a_terminal(*arguments, which="stdout").decode()
    assert shown.startswith("a\\x1b[2J\\u202eb\\x9b\tc")
    piped = subprocess.run([*MINIGEN, *arguments], capture_output=True, timeout=PATIENCE).stdout
    assert piped.decode().startswith(prompt)
    assert "\\x1b[2J" in on_a_terminal("info", "no\x1b[2Jfile", which="stderr").decode()
    piped = subprocess.run([*MINIGEN, "info", "no\x1b[2Jfile"], capture_output=True).stderr
    assert b"no\x1b[2Jfile" in piped


def test_only_what_cannot_be_seen_is_escaped() -> None:
    assert visible("é — “a”\n\t😀👩\u200d🚀\ufffd") == "é — “a”\n\t😀👩\u200d🚀\ufffd"
    assert visible("\r\x7f\u2066\u2028") == "\\r\\x7f\\u2066\\u2028"


# ---- Nothing waits for all


def test_pieces_come_text_by_text_each_as_soon_as_no_unfinished_text_is_before_it() -> None:
    text = Continuation(b"", "", [], "length")
    ends = [Piece(row, 1, "", text) for row in range(4)]
    first, begun, further = (Piece(row, 1, "", None) for row in (0, 2, 2))
    taken: list[Piece] = []

    def made() -> Iterator[Piece]:
        for piece in (ends[1], first, ends[3], begun, further, ends[0], ends[2]):
            taken.append(piece)
            yield piece

    come = [(piece, len(taken)) for piece in in_order(made())]
    of_the_sixth = [(piece, 6) for piece in (ends[0], ends[1], begun, further)]
    assert come == [(first, 2), *of_the_sixth, (ends[2], 7), (ends[3], 7)]


def test_lines_come_in_order_and_of_what_was_stopped_those_that_were_finished(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped() -> Iterator[Piece]:
        for row in (4, 1, 0, 3):
            yield Piece(row, 1, "", None)
            yield Piece(row, 1, "", Continuation(b"", str(row), [], "length"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _print_json_lines(stopped(), [b"a", b"b", b"c"], 2, {"seed": 0})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [(line["text"], line["prompt"], line["sample"], line["seed"]) for line in lines]
    assert told == [("0", "a", 0, 0), ("1", "a", 1, 0), ("3", "b", 1, 0), ("4", "c", 0, 0)]


@pytest.mark.parametrize("how", [[], ["--num-beams", "3"], ["--draft"]], ids=str)
def test_a_generation_that_is_stopped_has_given_every_text_that_was_finished(
    tiny_run: Path, tmp_path: Path, how: list[str]
) -> None:
    how = [*how, str(tiny_run)] if how == ["--draft"] else how
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"a\n" * 100_000)
    options = ["--prompts", str(prompts), "--max-new-tokens", "30", "--json", *how]
    command = [*MINIGEN, "generate", str(tiny_run), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, bufsize=0, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=PATIENCE)
    lines = [first, *rest.splitlines()]
    assert process.returncode == 130
    assert error == b"Error: interrupted\n"
    assert all(json.loads(line)["prompt"] == "a" for line in lines)
    assert len(lines) < 100_000
