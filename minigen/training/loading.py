"""Loading a model to write with, from a checkpoint or a run folder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from minigen.arguments import checked
from minigen.decoding.generator import Generator
from minigen.model.model import Model
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import ByteTokenizer, Text, Texts
from minigen.training import checkpoint


@checked
def load(model: str | Path) -> Generator:
    """Load MODEL, a checkpoint file or a run folder (its highest step), to write with.

    The text that its run held back is read where ``evaluate`` asks for it. Raises MinigenError
    where there is no checkpoint, or a damaged one.
    """
    path = checkpoint.locate(model)
    saved = checkpoint.load(path, moments=False)
    D, K, V = saved.tensors["W"].shape
    weights = Model(V, K, D)
    weights.load(saved.tensors)
    # What reads its text can be pickled, and finds the file from whatever folder it is called in.
    read = partial(_read, path.absolute())
    return Generator(weights, ByteTokenizer.from_state(saved.tokenizer), read=read)


def _read(path: Path, text: Text | Texts | None, paths: Sequence[str | Path]) -> Tokens:
    from minigen.training.run import Run  # imports pydantic, which writing does without

    return Run.load(path).read(text, paths)
