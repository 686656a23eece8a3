"""What training is measured on: the shape of every shipped config, and others, with batches."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np

from minigen import Config
from minigen.exact.streams import Stream
from minigen.text import corpus
from minigen.text.corpus import Tokens

Batches = list[tuple[np.ndarray, np.ndarray]]
SHAPES = {  # N, K, D, V, and the ratio to the fastest peer in float32 that is wanted
    (1, 8, 32, 257): "",
    (64, 8, 32, 257): "0.9",
    (512, 2, 40, 1024): "0.9",
    (256, 4, 20, 1024): "0.9",
    (256, 8, 64, 257): "1",
    (1024, 8, 64, 257): "1.5",
    (4096, 8, 64, 257): "3",
    (16384, 8, 64, 257): "6",
    (1024, 16, 64, 512): "1",
    (4096, 8, 64, 1024): "1.2",
}


def draw_batches(tokens: Tokens, N: int, K: int, count: int = 8) -> Batches:
    """Contexts (N, K) and targets (N,) from a text, as training draws them."""
    stream = Stream(0, "optimizer")
    draws = [stream.integers(N, len(tokens)) for _ in range(count)]
    return [tokens.contexts_and_targets(indices, K) for indices in draws]


def tokens(text: bytes, V: int) -> Tokens:
    """Return the training part of a text in V tokens."""
    return corpus.from_memory(text, vocab_size=V).training


def shipped() -> dict[str, Config]:
    """Return the shipped configs by name."""
    folder = resources.files("minigen") / "configs"  # in a wheel; else in a checkout
    folder = folder if folder.is_dir() else Path(__file__).parents[1] / "configs"
    names = sorted(Path(file.name).stem for file in folder.iterdir())
    return {name: Config.load(name) for name in names}


def cases(text: bytes) -> Iterator[tuple[str, tuple[int, ...], Batches, str]]:
    """Yield name, (N, K, D, V), batches and target: every shipped config, then the shapes above."""
    for name, config in shipped().items():
        read = corpus.from_memory(
            text, documents=config.corpus.documents, vocab_size=config.tokenizer.vocab_size
        )
        N, K = config.training.batch_size, config.model.context_length
        shape = (N, K, config.model.embedding_dim, read.tokenizer.vocab_size)
        yield name, shape, draw_batches(read.training, N, K), "0.9"
    for (N, K, D, V), target in SHAPES.items():
        yield "", (N, K, D, V), draw_batches(tokens(text, V), N, K), target
