"""Growth: what a step costs as each size doubles, what a token costs in a long text, memory."""

import time
from pathlib import Path

from benchmarks.harness import Table, rounds
from benchmarks.shapes import draw_batches, tokens
from benchmarks.training import minigen_step
from minigen.decoding.generation import Task, generate
from minigen.decoding.policy import Policy
from minigen.exact.streams import Stream
from minigen.model.model import Model
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer

BASE = {"N": 1024, "K": 8, "D": 64, "V": 512}
STEPS, TOKENS = 10_000, 1_000_000


def resident_megabytes() -> float:
    """Memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def run(text: bytes) -> list[Table]:
    sizes = Table(
        "A step, ms, as one size doubles from " + ", ".join(f"{k} = {v}" for k, v in BASE.items()),
        ["size", "÷ 4", "÷ 2", "× 1", "× 2", "× 4", "growth per doubling, at the end"],
    )
    for name in BASE:
        steps = {}
        for factor in (0.25, 0.5, 1, 2, 4):
            shape = {**BASE, name: max(257, int(BASE[name] * factor))}
            if name != "V":
                shape[name] = int(BASE[name] * factor)
            N, K, D, V = shape.values()
            steps[factor] = minigen_step((V, K, D), draw_batches(tokens(text, V), N, K))
        times = rounds(steps, repetitions=7)
        sizes.add(name, *(times[factor] * 1e3 for factor in steps), times.ratio(4, 2))

    length = Table(
        f"A long text: {TOKENS:,} tokens, one stream; {STEPS:,} steps, N = 64",
        ["part", "µs a token", "memory, MB", "µs a step", "memory, MB"],
    )
    model, tokenizer = Model(257, 8, 32), ByteTokenizer()
    model.initialize(Stream(0, "init"))
    policy = Policy(repetition_penalty=1.1, suppress_tokens=(END_OF_TEXT,))
    task = Task(model, tokenizer, policy, max_new_tokens=TOKENS)
    pieces = generate(task, [""], lambda _: Stream(0, "inference"))
    step = minigen_step((257, 8, 32), draw_batches(tokens(text, 257), 64, 8))
    for part in range(1, 6):
        start = time.perf_counter()
        for _ in range(TOKENS // 5):
            next(pieces)
        token_time, token_memory = time.perf_counter() - start, resident_megabytes()
        start = time.perf_counter()
        for _ in range(STEPS // 5):
            step()
        step_time = time.perf_counter() - start
        length.add(
            f"{part} of 5",
            token_time / (TOKENS // 5) * 1e6,
            token_memory,
            step_time / (STEPS // 5) * 1e6,
            resident_megabytes(),
        )
    return [sizes, length]
