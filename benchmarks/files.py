"""Files: saving and loading against plain writing and reading; large texts, rates and memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Table, rounds
from minigen import Config, Run
from minigen.checkpoint import load, save
from minigen.tokenizer import ByteTokenizer

GIGABYTE = 1 << 30
INGEST = """
import json, sys, time
from pathlib import Path
from minigen import corpus
from minigen.tokenizer import ByteTokenizer
def memory():  # the most that this process ever held, in MB
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
text, cache, state = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = ByteTokenizer.from_state(state)
before, start = memory(), time.perf_counter()
corpus.load([text], cache=cache, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
print(json.dumps([time.perf_counter() - start, memory() - before]))
"""


def write_large_text(path: Path, text: bytes, size: int) -> None:
    """Write copies of a text; one byte of 300 in each is a random letter: new words keep coming."""
    rng = np.random.Generator(np.random.Philox(0))
    original = np.frombuffer(text, np.uint8)
    with path.open("wb") as file:
        for _ in range(-(-size // len(text))):
            copy = original.copy()
            places = rng.integers(0, len(copy), len(copy) // 300)
            copy[places] = rng.integers(97, 123, len(places))
            file.write(copy.tobytes())


def library_rate(path: Path, tokenizer: ByteTokenizer, size: int) -> float:
    """Return bytes a second of the tokenizers library's own batches, on all cores."""
    data = path.read_bytes()[:size].decode("latin-1")
    texts = [data[start : start + (1 << 16)] for start in range(0, len(data), 1 << 16)]
    from tokenizers import pre_tokenizers

    library = tokenizer._library
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    start = time.perf_counter()
    library.encode_batch_fast(texts, add_special_tokens=False)
    return len(data) / (time.perf_counter() - start)


def ingestion(text: bytes, folder: Path) -> Table:
    table = Table(
        "Tokens of a large text, in a file",
        ["vocabulary", "text, MB", "MB/s", "compared with", "MB/s", "memory, MB", "target"],
        "Copies of the text with random letters in it. Memory is the peak above the interpreter's.",
    )
    path = folder / "large.txt"
    for vocab_size, size in ((257, GIGABYTE), (1024, GIGABYTE // 4)):
        write_large_text(path, text, size)
        size = path.stat().st_size
        tokenizer = ByteTokenizer.train([text], vocab_size)
        command = [sys.executable, "-c", INGEST, path, folder, json.dumps(tokenizer.state())]
        seconds, memory = json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout
        )
        if vocab_size == 257:
            start = time.perf_counter()
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass
            peer, peer_rate = "reading", size / (time.perf_counter() - start)
            target = "200 MB/s, 400 MB"
        else:
            peer, peer_rate = "tokenizers", library_rate(path, tokenizer, 1 << 24)
            target = "90 % of tokenizers, 400 MB"
        table.add(
            vocab_size, size / 1e6, size / seconds / 1e6, peer, peer_rate / 1e6, memory, target
        )
    return table


def checkpoints(text: bytes, folder: Path) -> Table:
    overrides = {
        "tokenizer.vocab_size": 1024,
        "model.context_length": 16,
        "model.embedding_dim": 128,
        "training.steps": 1,
        "training.batch_size": 64,
    }
    run = Run(Config.load("fables", overrides), text=text)
    run.train()
    path, plain = folder / "model.safetensors", folder / "plain"
    run.save(path)
    checkpoint, data = load(path), path.read_bytes()

    def write() -> None:
        with plain.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    write()
    contestants: dict[str, Callable[[], object]] = {
        "save": lambda: save(path, checkpoint),
        "plain write": write,
        "load": lambda: load(path),
        "plain read": plain.read_bytes,
        "load without moments": lambda: load(path, moments=False),
    }
    times = rounds(contestants, repetitions=9)
    table = Table(
        f"A checkpoint of {len(data) / 1e6:.0f} MB",
        ["what", "ms", "compared with", "ms", "ratio", "target"],
    )
    for name, peer, target in (
        ("save", "plain write", "3"),
        ("load", "plain read", "3"),
        ("load without moments", "load", ""),
    ):
        ratio = times.ratio(name, peer)
        table.add(name, times[name] * 1e3, peer, times[peer] * 1e3, ratio, target)
    return table


def run(text: bytes) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [checkpoints(text, Path(folder)), ingestion(text, Path(folder))]
