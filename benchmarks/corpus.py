"""Corpora: a gigabyte of text becomes tokens, and contexts are gathered from them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.harness import Table, rounds
from minigen.exact.streams import Stream
from minigen.text import corpus
from minigen.text.tokenizer import ByteTokenizer

GIGABYTE = 1 << 30
INGEST = """
import json, sys, time
from pathlib import Path
from minigen.text import corpus
def memory():  # the most that this process ever held, in MB
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
text, cache, documents = sys.argv[1:]
before, clock, cpu = memory(), time.perf_counter(), time.process_time()
corpus.load([text], cache=Path(cache), documents=documents, validation_fraction=0.1)
print(json.dumps([time.perf_counter() - clock, time.process_time() - cpu, memory() - before]))
"""


def ingestion(path: Path, folder: Path) -> Table:
    table = Table(
        "From a gigabyte to tokens of the byte vocabulary",
        ["documents", "MB/s", "MB/s of CPU time", "memory, MB", "target"],
        "Hashing, reading, writing the token file. CPU time leaves out what others do meanwhile.",
    )
    for documents in ("file", "line", "paragraph"):
        command = [sys.executable, "-c", INGEST, path, folder / documents, documents]
        output = subprocess.run(command, check=True, capture_output=True).stdout
        seconds, cpu, memory = json.loads(output)
        megabytes = path.stat().st_size / 1e6
        target = "200 MB/s, 400 MB"
        table.add(documents, megabytes / seconds, megabytes / cpu, memory, target)
    return table


def merges(text: bytes) -> Table:
    """Encode paragraphs: ours as one stream, its words forgotten before; theirs as a batch."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    whole = (text * (1 + (1 << 23) // len(text))).decode("latin-1")
    tokenizer = ByteTokenizer.train([text], 1024)
    blocks = [whole[start : start + corpus.BLOCK] for start in range(0, len(whole), corpus.BLOCK)]

    def ours() -> None:
        tokenizer._tokens_of_word.clear()
        for _ in tokenizer.encode_stream(blocks):
            pass

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1023, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([text.decode("latin-1")], trainer)
    paragraphs = [paragraph for paragraph in whole.split("\n\n") if paragraph]
    contestants = {
        "minigen": ours,
        "encode_batch": lambda: library.encode_batch(paragraphs),
        "encode_batch_fast": lambda: library.encode_batch_fast(paragraphs),
    }
    times = rounds(contestants, repetitions=5)
    table = Table(
        "Encoding with 767 merges, on all cores",
        ["by", "MB/s", "its time ÷ minigen's", "target"],
        "The library learned as many from the same text, and splits words by its own ByteLevel.",
    )
    for name in contestants:
        ratio = "" if name == "minigen" else times.ratio(name, "minigen")
        target = "" if name == "minigen" else "0.9"
        table.add(name, len(whole) / 1e6 / times[name], ratio, target)
    return table


def gathering(path: Path, folder: Path) -> Table:
    table = Table(
        "Gathering the contexts of a step, K = 8",
        ["N", "from memory, ms", "from a token file of 2 GB, ms"],
        "Of a file, each window is read: pages that are mapped would count as memory.",
    )
    with path.open("rb") as file:
        memory = corpus.from_memory(file.read(1 << 20), documents="paragraph").training
    file = corpus.load(
        [path], cache=folder / "paragraph", documents="paragraph", validation_fraction=0.1
    ).training
    for N in (64, 256, 1024, 16384):
        stream = Stream(0, "optimizer")

        def gather(tokens: corpus.Tokens, N: int = N, stream: Stream = stream) -> np.ndarray:
            return tokens.contexts_and_targets(stream.integers(N, len(tokens)), 8)[0]

        times = rounds({"memory": lambda: gather(memory), "file": lambda: gather(file)})
        table.add(N, times["memory"] * 1e3, times["file"] * 1e3)
    return table


def run(text: bytes) -> list[Table]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "large.txt"
        with path.open("wb") as file:
            for _ in range(-(-GIGABYTE // len(text))):
                file.write(text)
        return [ingestion(path, folder), merges(text), gathering(path, folder)]
