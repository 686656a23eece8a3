"""Loading a model to write with, from a checkpoint or a run folder."""

from collections.abc import Sequence
from pathlib import Path

from minigen.arguments import checked
from minigen.decoding.generator import Generator
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import Text, Texts
from minigen.training.checkpoint import load_model, locate


@checked
def load(model: str | Path) -> Generator:
    """Load MODEL, a checkpoint file or a run folder (its highest step), to write with.

    The text that its run held back is read where ``evaluate`` asks for it. Raises MinigenError
    where there is no checkpoint, or a damaged one.
    """
    path = locate(model)

    def read(text: Text | Texts | None, paths: Sequence[str | Path]) -> Tokens:
        from minigen.training.run import Run  # imports pydantic, which writing does without

        return Run.load(path).read(text, paths)

    return Generator(*load_model(path), read=read)
