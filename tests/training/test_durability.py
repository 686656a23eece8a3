"""What a power cut leaves after any write: each file whole, none relying on what is gone.

A file is on the disk once it was synced after its last write; a name is, once its folder was.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from minigen import Config, cli, sweep
from minigen.text.corpus import load
from tests.conftest import TINY, TINY_SETTINGS

LOGS = ("metrics.jsonl", "samples.jsonl")


class Disk:
    """Follows what is synced and replaced, and checks the order of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[tuple[int, int], int] = {}  # a file or folder, and its size then
        self.replaced: list[Path] = []
        self.waiting: dict[tuple[int, int], Path] = {}  # folders in which a name is not yet kept
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        stat = os.fstat(descriptor)
        self.synced[stat.st_dev, stat.st_ino] = stat.st_size
        self.waiting.pop((stat.st_dev, stat.st_ino), None)

    def is_kept(self, path: Any) -> bool:
        stat = os.stat(path)
        return self.synced.get((stat.st_dev, stat.st_ino)) == stat.st_size

    def replace(self, source: Any, target: Any) -> None:
        path = Path(target)
        assert self.is_kept(source), f"{path.name} takes its place before it is on the disk"
        assert not self.waiting, f"{path.name} is written before {self.waiting} are kept"
        if path.name.startswith("step-"):
            relied_on = [path.parent / log for log in LOGS if (path.parent / log).exists()]
            assert all(map(self.is_kept, relied_on)), f"{path.name} before the logs it relies on"
        self._replace(source, target)
        stat = os.stat(path.parent)
        self.waiting[stat.st_dev, stat.st_ino] = path
        self.replaced.append(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_training_keeps_each_file_before_another_relies_on_it(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli.run(["train", *TINY_SETTINGS, "--report", "--out", str(folder)]) == 0
    assert [path.name for path in disk.replaced] == [
        "config.toml",
        "step-000000.safetensors",
        "step-000004.safetensors",
        "step-000006.safetensors",
        "report.html",
    ]
    assert not disk.waiting
    assert all(disk.is_kept(folder / log) for log in LOGS)
    above = tmp_path.stat()
    assert (above.st_dev, above.st_ino) in disk.synced  # which holds the folder's own name


def test_a_sweep_keeps_its_plan_before_its_runs(disk: Disk, tmp_path: Path) -> None:
    sweep(Config.load("fables", TINY), {}, out=tmp_path / "runs", seeds=[0])
    assert [path.name for path in disk.replaced] == [
        ".sweep.json",
        "config.toml",  # when all are planned, and when this one is trained
        "config.toml",
        "step-000000.safetensors",
        "step-000004.safetensors",
        "step-000006.safetensors",
    ]
    assert not disk.waiting


def test_kept_tokens_are_on_the_disk_before_they_have_their_name(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigen.text import corpus

    monkeypatch.setenv("MINIGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "LARGE", 1)
    (tmp_path / "text.txt").write_text("a longer text than that\n")
    load([str(tmp_path / "text.txt")])
    assert disk.replaced
    assert not disk.waiting
