"""Files: saving and loading a checkpoint against plain writing and reading of as many bytes."""

import os
import tempfile
from pathlib import Path

from benchmarks.harness import Table, rounds
from minigen import Config, Run
from minigen.training.checkpoint import load, save

OVERRIDES = {
    "tokenizer.vocab_size": 1024,
    "model.context_length": 16,
    "model.embedding_dim": 128,
    "training.steps": 1,
    "training.batch_size": 64,
}


def run(text: bytes) -> list[Table]:
    trained = Run(Config.load("fables", OVERRIDES), text=text)
    trained.train()
    with tempfile.TemporaryDirectory() as folder:
        path, plain = Path(folder) / "model.safetensors", Path(folder) / "plain"
        trained.save(path)
        checkpoint, data = load(path), path.read_bytes()

        def write() -> None:
            with plain.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        times = rounds(
            {
                "plain write": write,
                "save": lambda: save(path, checkpoint),
                "plain read": plain.read_bytes,
                "load": lambda: load(path),
                "load without moments": lambda: load(path, moments=False),
            },
            repetitions=9,
        )
    table = Table(
        f"A checkpoint of {len(data) / 1e6:.0f} MB",
        ["what", "ms", "compared with", "ms", "ratio", "target"],
        "Each tensor has its SHA-256, computed on saving and on loading.",
    )
    for name, peer, target in (
        ("save", "plain write", "3"),
        ("load", "plain read", "3"),
        ("load without moments", "load", ""),
    ):
        ratio = times.ratio(name, peer)
        table.add(name, times[name] * 1e3, peer, times[peer] * 1e3, ratio, target)
    return [table]
