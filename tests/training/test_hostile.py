"""Files of a run folder are believed for what they hold alone: sealed is not the same as valid."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minigen import MinigenError, Run
from minigen.training import checkpoint
from tests.conftest import TINY_SETTINGS, Result

Command = Callable[..., Result]
Description = dict[str, Any]


@pytest.fixture
def folder(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, with checkpoints of steps 0, 4 and 6."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def refused(found: Result) -> str:
    """The one line that says why."""
    assert (found.status, found.err.count("\n")) == (1, 1), found
    assert "unexpected" not in found.err
    assert len(found.err) < 600
    return found.err


# ── Sealed, and not valid ────────────────────────────────────────────────────────────────────────


def sealed(path: Path, change: Callable[[Description], object]) -> None:
    """Change the description of a checkpoint and make its checksum right again."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + size]), data[8 + size :]
    description = json.loads(header["__metadata__"]["minigen"])
    del description["checksum"]
    change(description)
    description["checksum"] = checkpoint._checksum(description)
    header["__metadata__"]["minigen"] = checkpoint._canonical(description)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def setting(table: str, key: str, value: object) -> Callable[[Description], object]:
    return lambda description: description["config"][table].__setitem__(key, value)


TABLES = ("run", "corpus", "training", "sampling", "model", "tokenizer")
HOSTILE: dict[str, tuple[Callable[[Description], object], str]] = {
    **{
        f"the table {name} is a number": (
            lambda d, name=name: d["config"].__setitem__(name, 5),
            f"{name} must be a table",
        )
        for name in TABLES
    },
    "K = 0": (setting("model", "context_length", 0), "model.context_length must be an integer of"),
    "D = 0": (setting("model", "embedding_dim", 0), "model.embedding_dim must be an integer of"),
    "K is a text": (setting("model", "context_length", "8" * 10_000), "(got '888"),
    "a far step": (lambda d: d.update(step=10**9), "it is at step 1000000000 of training.steps"),
    "no number of steps": (setting("training", "steps", []), "training.steps in it must be an"),
    "many streams": (
        lambda d: d["streams"].update({f"s{i}": 0 for i in range(20_000)}),
        "it holds a stream that no run has: 's0'",
    ),
    "more streams": (
        lambda d: d["streams"].update({f"s{i}": 0 for i in range(200_000)}),
        "its description must have at most",
    ),
    "a long prompt": (setting("sampling", "prompt", "x" * 60_000_000), "shorten sampling.prompt"),
    "a path": (setting("corpus", "text", ["/dev/zero"]), "never a path"),
    "merges are a number": (lambda d: d["tokenizer"].update(merges=5), "is not complete"),
    "tensors are numbers": (lambda d: d.update(tensors={"E": 5}), "is not complete"),
}


@pytest.mark.parametrize(
    ("hostile", "command"),
    [*((name, "info") for name in HOSTILE), ("a path", "generate"), ("a far step", "verify")],
)
def test_a_hostile_description_with_a_right_checksum_is_refused_in_a_line(
    hostile: str, command: str, tiny_run: Path, tmp_path: Path, minigen: Command
) -> None:
    change, cause = HOSTILE[hostile]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(at(tiny_run, 6).read_bytes())
    sealed(path, change)
    assert cause in refused(minigen(command, str(path)))


def test_a_changed_and_sealed_checkpoint_that_is_valid_is_read(folder: Path) -> None:
    """The control of the test above."""
    sealed(at(folder, 6), setting("sampling", "prompt", "Twice"))
    assert checkpoint.load(at(folder, 6)).config["sampling"]["prompt"] == "Twice"


def test_a_sparse_file_of_fifty_gigabytes_is_refused_unread(
    folder: Path, minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigen.model.memory.available", lambda: 1 << 33)
    os.truncate(at(folder, 6), 50 << 30)
    said = refused(minigen("generate", str(folder)))
    assert said == (
        f"Error: cannot load {at(folder, 6)}: it needs 50.0 GiB of memory, and there is 8.0 GiB: "
        "use a machine with more memory\n"
    )


# ── Damaged, and refused with the cure ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_damaged_newest_checkpoint_is_refused_and_removing_it_is_the_cure(
    size: int, folder: Path, minigen: Command
) -> None:
    newest = at(folder, 6)
    whole = newest.read_bytes()
    newest.write_bytes(whole[:size])
    resume = ["train", "--resume", "--out", str(folder)]
    said = refused(minigen(*resume))
    assert str(newest) in said
    assert "if it is removed, the run goes on from step 4" in said
    newest.unlink()
    assert minigen(*resume).status == 0
    assert newest.read_bytes() == whole


def test_the_cure_passes_over_what_is_damaged_too_or_too_old(
    folder: Path, minigen: Command
) -> None:
    resume, cure = ["train", "--resume", "--out", str(folder)], "if it is removed, the run goes on "
    old = replace(checkpoint.load(at(folder, 4)), format=1)
    checkpoint.save(at(folder, 4), old)
    for step in (6, 4):
        at(folder, step).write_bytes(b"")
        assert f"{cure}from step 0" in refused(minigen(*resume))
    at(folder, 0).unlink()
    assert f"{cure}from step 0" in refused(minigen(*resume))
    at(folder, 6).unlink()
    checkpoint.save(at(folder, 4), old)
    assert f"{at(folder, 4)} is of format 1, whose gradient" in refused(minigen(*resume))


def test_a_run_of_format_1_is_used_though_its_steps_break_what_became_a_rule(
    tmp_path: Path, minigen: Command
) -> None:
    folder = tmp_path / "run"
    longer = ["--set", "model.context_length=32", "--set", "model.embedding_dim=1"]
    assert minigen("train", *TINY_SETTINGS, *longer, "--out", str(folder)).status == 0
    for file in checkpoint.by_step(folder).values():
        saved = checkpoint.load(file)
        saved.config["training"]["batch_size"] = 2**21
        saved.streams["optimizer"] = saved.step * 2**21
        checkpoint.save(file, replace(saved, format=1))
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("batch_size = 16", f"batch_size = {2**21}"))
    for command in ("info", "generate", "score", "next", "evaluate", "report"):
        words = ["once"] if command == "score" else []
        assert minigen(command, str(folder), *words).status == 0, command
    assert minigen("diff", str(folder), str(at(folder, 6))).status == 0
    for command in (["verify", str(folder)], ["train", "--resume", "--out", str(folder)]):
        assert "is of format 1, whose gradient" in refused(minigen(*command))
    assert minigen("train", *longer, "--set", f"training.batch_size={2**21}").status == 2


@pytest.mark.parametrize(
    "command", ["generate", "info", "report", "verify", "train --resume --out"]
)
def test_a_file_of_another_step_than_its_name_is_refused_by_every_command(
    command: str, folder: Path, minigen: Command
) -> None:
    shutil.copy(at(folder, 4), at(folder, 900))
    said = refused(minigen(*command.split(), str(folder)))
    assert f"{at(folder, 900)} is of step 4, whatever its name says: remove it" in said


def test_nor_is_a_file_saved_that_loading_would_refuse_for_its_name(tiny_run: Path) -> None:
    run = Run.load(tiny_run)
    for name in ("step-5.safetensors", "step-000000000000000007.safetensors"):
        with pytest.raises(MinigenError, match="its name is that of another step, and it is of 6"):
            run.save(tiny_run.with_name(name))
        assert not tiny_run.with_name(name).exists()


@pytest.mark.parametrize("name", ["step-7-best", "step-7 (1)", "my-step-7", "STEP-7", "step-"])
def test_any_other_name_of_a_users_own_is_free(name: str, tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.safetensors"
    Run.load(tiny_run).save(path)
    assert Run.load(path).step == 6


# ── The config, and what a kill leaves of it ─────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [b"", b"\n", b"# seed = 0\n", b"\0" * 500])
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_an_emptied_config_is_not_the_config_of_all_defaults(
    content: bytes, has_checkpoints: bool, folder: Path, minigen: Command
) -> None:
    (folder / "config.toml").write_bytes(content)
    if not has_checkpoints:
        for path in folder.glob("step-*"):
            path.unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = refused(minigen("train", "--resume", "--out", str(folder)))
    assert f"{folder / 'config.toml'} is" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_nor_is_it_in_a_sweep(folder: Path, tmp_path: Path, minigen: Command) -> None:
    (folder / "config.toml").write_bytes(b"")
    assert "config.toml is empty" in refused(minigen("sweep", "--resume", "--out", str(tmp_path)))


STRAYS = [
    ".config.toml.0123456789abcdef.unfinished",
    ".config.toml.1.tmp",
    ".step-000000.safetensors.0123456789abcdef.unfinished",
]


@pytest.mark.parametrize("stray", STRAYS)
def test_in_a_folder_with_what_a_kill_left_alone_a_run_can_be_started(
    stray: str, tmp_path: Path, minigen: Command
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / stray).write_bytes(b"[run]\nse")
    assert "it has no config.toml" in refused(minigen("train", "--resume", "--out", "run"))
    assert minigen("train", *TINY_SETTINGS, "--out", "run").status == 0
    assert minigen("train", "--resume", "--out", "run").status == 0


def test_a_folder_of_something_else_is_refused_by_both_without_naming_the_other(
    tmp_path: Path, minigen: Command
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_bytes(b"")
    assert "--resume" not in refused(minigen("train", *TINY_SETTINGS, "--out", "run"))
    assert "without" not in refused(minigen("train", "--resume", "--out", "run"))
