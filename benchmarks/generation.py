"""Generation: a token against a PyTorch loop, each policy against none, the command's start."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.harness import Table, rounds
from minigen import Config, Policy, Run
from minigen.decoding.generation import Task, generate
from minigen.exact.streams import Stream
from minigen.text.tokenizer import END_OF_TEXT

TOKENS, TOP_K = 200, 40
POLICIES = {
    "plain": {},
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": TOP_K},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 0.001},
    "eta_cutoff": {"eta_cutoff": 0.001},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "frequency and presence": {"frequency_penalty": 0.1, "presence_penalty": 0.1},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 4},
    "logit_bias, suppress, min_new_tokens": {
        "logit_bias": {101: 0.5},
        "suppress_tokens": (0,),
        "min_new_tokens": 10,
    },
}


def trained(text: bytes) -> Run:
    overrides = {
        "tokenizer.vocab_size": 257,
        "model.context_length": 8,
        "model.embedding_dim": 64,
        "training.steps": 200,
        "evaluation.every": 0,
        "sampling.every": 0,
    }
    run = Run(Config.load("fables", overrides), text=text)
    run.train()
    run.model.parameters["b"][END_OF_TEXT] = -100.0  # every text is as long as the peer's
    run.model.changed()
    return run


def minigen_generation(run: Run, policy: Policy, streams: int) -> Callable[[], None]:
    def call() -> None:
        task = Task(run.model, run.tokenizer, policy, max_new_tokens=TOKENS)
        pieces = generate(task, [""] * streams, lambda i: Stream(0, f"inference/{i}"))
        for _ in pieces:
            pass

    return call


def torch_generation(shape: tuple[int, ...], streams: int, masked: bool) -> Callable[[], None]:
    """Return a loop on one thread: a second one has never made it faster."""
    model = peers.TorchModel(*shape)
    generation = peers.torch_generation(model, shape[1], TOP_K, streams, masked=masked)

    def call() -> None:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        generation(TOKENS)
        torch.set_num_threads(usual)

    return call


def start_of_command(model: Path) -> Table:
    """Wall time of whole processes, up to the first character of the text."""
    minigen = str(Path(sys.executable).with_name("minigen"))
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import numpy": [sys.executable, "-c", "import numpy; print(1)"],
        "minigen --help": [minigen, "--help"],
        "minigen generate": [minigen, "generate", str(model), "Once"],
    }

    def started(command: list[str]) -> Callable[[], None]:
        def call() -> None:
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                process.stdout.read(1)
                process.kill()

        return call

    times = rounds({name: started(command) for name, command in commands.items()}, seconds=0)
    targets = {"minigen --help": "0.2 s", "minigen generate": "0.6 s"}
    table = Table(
        "From the command's start to its first character",
        ["command", "s", "target"],
        "Most of it is Python's own start and numpy's import.",
    )
    for name in commands:
        table.add(name, times[name], targets.get(name, ""))
    return table


def run(text: bytes) -> list[Table]:
    trained_run = trained(text)
    model = trained_run.model
    shape = model.vocab_size, model.context_length, model.embedding_dim

    against_peer = Table(
        f"A step, with top_k = {TOP_K}, K = {shape[1]}, D = {shape[2]}, V = {shape[0]}",
        [
            "streams",
            "minigen, µs",
            "PyTorch, mask, µs",
            "÷ minigen",
            "PyTorch, k alone, µs",
            "÷ minigen",
            "target",
        ],
        "PyTorch with a mask is nanoGPT's loop, over all V tokens; its leanest form draws from the "
        "k alone. One stream is bound by numpy's calls, about 45 of half a microsecond: 8 for the "
        "logits, 17 for the exact `exp`. With 64, a third is Python's work on each text (bytes, "
        "a piece), a fifth the sum of K table rows; the k-th logit is found among integers, "
        "whose order is that of the numbers. Tried: running sums of the next K logits (more memory "
        "to move with 64 texts), blocks of rows for `exp`, an in-place `exp`: no gain.",
    )
    for streams, target in ((1, 3), (64, 4)):
        times = rounds(
            {
                "minigen": minigen_generation(trained_run, Policy(top_k=TOP_K), streams),
                "mask": torch_generation(shape, streams, masked=True),
                "k alone": torch_generation(shape, streams, masked=False),
            }
        )
        cells: list[object] = [streams, times["minigen"] / TOKENS * 1e6]
        for peer in ("mask", "k alone"):
            cells += [times[peer] / TOKENS * 1e6, times.ratio(peer, "minigen")]
        against_peer.add(*cells, target)

    policies = Table(
        "A step under each policy, one stream and 64",
        ["policy", "µs", "÷ plain (target 3)", "64 streams, µs", "÷ plain (target 3)"],
    )
    one, many = (
        rounds(
            {
                name: minigen_generation(trained_run, Policy(**options), streams)
                for name, options in POLICIES.items()
            }
        )
        for streams in (1, 64)
    )
    for name in POLICIES:
        cells = ((times[name] / TOKENS * 1e6, times.ratio(name, "plain")) for times in (one, many))
        policies.add(name, *next(cells), *next(cells))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        trained_run.save(path)
        return [against_peer, policies, start_of_command(path)]
