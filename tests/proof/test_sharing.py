"""A row to share: what computes here and what it gave, and nothing of who ran it."""

import getpass
import json
import platform
from pathlib import Path

import pytest

from minigen import Config, Run
from minigen.cli import run as command
from minigen.proof import proving, sharing
from minigen.proof.laboratory import Claim, Control

SETTINGS = ["training.steps=4", "training.batch_size=8", "tokenizer.vocab_size=257"]


@pytest.fixture
def prove(monkeypatch, capsys):
    """Run the command with one experiment that does nothing."""
    claim = Claim("nothing", True, "evidence", Control("control", True))
    monkeypatch.setattr(proving, "EXPERIMENTS", (lambda laboratory: claim,))

    def call(*options):
        changes = [part for setting in SETTINGS for part in ("--set", setting)]
        assert command(["prove", *changes, *options]) == 0
        return capsys.readouterr().out

    return call


def test_the_row_states_environment_config_and_fingerprints(prove):
    row = json.loads(prove("--share", "--json"))["share"]
    config = Config.load("fables", {"training.steps": 4, "training.batch_size": 8})
    off = {"sampling.every": 0, "evaluation.every": 0, "tokenizer.vocab_size": 257}
    run = Run(config.override(off))
    run.train()
    assert row["fingerprint"] == run.fingerprint != row["plain floats"]
    assert row["text"] == run.corpus_sha256
    assert row["config"].startswith("fables, ")
    assert "training.steps = 4" in row["config"]
    assert row["python"].endswith(platform.python_version())
    assert platform.machine() in row["system"]
    assert row["claims"] == "nothing holds"
    assert {"numpy", "scipy", "numba", "blas", "simd", "engine", "processor"} <= row.keys()


def test_a_reader_gets_a_block_that_can_be_pasted(prove):
    lines = prove("--share").splitlines()
    start = lines.index("```")
    assert lines[-1] == "```"
    names = [line.split()[0] for line in lines[start + 1 : -1]]
    assert names[:2] == ["minigen", "python"]
    assert "fingerprint" in names
    assert "```" not in prove()


def test_nothing_in_it_tells_who_or_where():
    text = str(sharing.environment()) + sharing.settings(Config.load("fables"))
    for secret in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert secret not in text
    if len(user := getpass.getuser()) > 4:
        assert user not in text


def test_a_text_that_can_be_read_once_is_refused(capsys):
    assert command(["prove", "--share", "--text", "-"]) == 2
    assert "give a file (got --text -)" in capsys.readouterr().err
