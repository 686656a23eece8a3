"""The published checkpoint is what its config gives, and the README says what it gives."""

import re
import shlex
from pathlib import Path

import pytest

from minigen import Config, Run
from minigen.training.checkpoint import fingerprint, load

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "checkpoints" / "fables.safetensors"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown(command: str) -> list[tuple[str, str]]:
    """Commands of the README that begin so, with what it shows as their output."""
    blocks = re.findall(r"^\$ (.*)\n((?:(?!\$ |```).*\n)*)", README, re.MULTILINE)
    return [(line, output) for line, output in blocks if line.startswith(command)]


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """The checkpoint of the shipped config, trained here."""
    run = Run(Config.load("fables"))
    run.train()
    path = tmp_path_factory.mktemp("rebuilt") / "fables.safetensors"
    run.save(path)
    return path


def test_training_its_config_again_gives_the_same_file(rebuilt):
    published, again = load(PUBLISHED), load(rebuilt)
    assert again.config == published.config
    assert fingerprint(again.tensors) == fingerprint(published.tensors)
    assert rebuilt.read_bytes() == PUBLISHED.read_bytes()


def test_the_readme_shows_its_fingerprint():
    (_, output), *_ = shown("minigen info checkpoints/fables.safetensors")
    (pinned,) = re.findall(r"^fingerprint +([0-9a-f]{64})$", output, re.MULTILINE)
    assert pinned == fingerprint(load(PUBLISHED).tensors)


def test_the_readme_shows_a_text_that_it_writes(minigen):
    (command, text), *_ = shown('minigen generate checkpoints/fables.safetensors "Once"')
    _, generate, _, *arguments = shlex.split(command)
    assert minigen(generate, str(PUBLISHED), *arguments).out == text


def test_it_is_small():
    assert PUBLISHED.stat().st_size < 3_000_000
