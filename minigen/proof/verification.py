"""Verification: a checkpoint is trained again from the config inside it, and every bit compared."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigen.errors import MinigenError
from minigen.text.corpus import Progress
from minigen.training import checkpoint
from minigen.training.config import CONFIG, Config, differences, located
from minigen.training.folder import METRICS, read_lines
from minigen.training.run import Run, StepRecord

_LOGGED = ("loss_bits", "learning_rate", "optimizer_position", "fingerprint")


class Verification:
    """A checkpoint file, and a run from step 0 that should arrive at the same.

    ``texts`` are paths of the text that it was trained on; without them it is the embedded one or
    the one that a config.toml beside the file names. Raises MinigenError where the file is damaged,
    where that config.toml disagrees with the one in the file, and where the text is another one.
    """

    def __init__(
        self,
        model_path: str | Path,
        texts: Sequence[str | Path] = (),
        *,
        progress: Progress | None = None,
    ):
        self.path = checkpoint.locate(model_path)
        self.saved = checkpoint.load(self.path)
        checkpoint.require_trainable(self.path, self.saved.format)
        config = Config.from_dict(self.saved.config, source=str(self.path))
        if self.saved.step > config.training.steps:
            raise MinigenError(
                f"{self.path} cannot be right: it is at step {self.saved.step} of "
                f"training.steps = {config.training.steps}"
            )
        self._check_config_beside(config)
        text = texts or located(config, self.path).corpus.text
        if text == "external":
            raise MinigenError(
                f"{self.path} was trained on a text that is not in it: give that text with --text"
            )
        self.run = Run(config.override({"corpus.text": text}), progress=progress)
        if self.run.corpus_sha256 != self.saved.corpus_sha256:
            raise MinigenError(
                f"the text is not the one that {self.path} was trained on: its SHA-256 is "
                f"{self.run.corpus_sha256}, the checkpoint's {self.saved.corpus_sha256}; "
                "give the same text with --text"
            )
        self.logged = self._read_metrics()
        self.parting = ""  # where metrics.jsonl and the new run part

    def _check_config_beside(self, config: Config) -> None:
        path = self.path.parent / CONFIG
        if not path.is_file():
            return
        beside = Config.load(path)
        inside = config.corpus.text
        disagreements = [
            f"{key} is {there!r} in it and {here!r} in {self.path.name}"
            for key, here, there in differences(config, beside)
            if key != "corpus.text" or "fables" in (inside, there)  # a path is not in the file
        ]
        if disagreements:
            raise MinigenError(
                f"{path} disagrees with the checkpoint: {'; '.join(disagreements)}; to verify the "
                "checkpoint alone, copy it elsewhere"
            )

    def _read_metrics(self) -> dict[int, dict[str, Any]]:
        try:
            return {line["step"]: line for line in read_lines(self.path.parent / METRICS)}
        except (MinigenError, KeyError, TypeError):
            return {}  # only an aid: the checkpoint is verified without it

    def steps(self) -> Iterator[StepRecord]:
        """Train up to the checkpoint's step, comparing with metrics.jsonl on the way."""
        for record in self.run.steps(self.saved.step):
            new, old = record.metrics(), self.logged.get(record.step, {})
            keys = [key for key in _LOGGED if key in old and key in new and old[key] != new[key]]
            if keys and not self.parting:
                values = ", ".join(f"{key} {old[key]}, trained again {new[key]}" for key in keys)
                self.parting = f"{METRICS} differs first at step {record.step}: {values}"
            yield record

    def agreement(self) -> str:
        """Say how far metrics.jsonl agrees, where it does not part from the new run."""
        steps = len([step for step in self.logged if step <= self.saved.step])
        if not steps:
            return f"no {METRICS} is beside the file, which could tell the step"
        return f"{METRICS} agrees at all its {steps} steps: the file was changed after training"

    def again(self) -> checkpoint.Checkpoint:
        """Return the checkpoint that the run of now would write."""
        with tempfile.TemporaryDirectory(prefix="minigen-") as folder:
            path = Path(folder) / "again.safetensors"
            self.run.save(path)
            return checkpoint.load(path)


def verify(
    model: str | Path, texts: Sequence[str | Path] = (), *, progress: Progress | None = None
) -> list[str]:
    """Train MODEL again from the config inside it; return a line for each thing that differs.

    What it takes and raises is that of `Verification`.
    """
    verification = Verification(model, texts, progress=progress)
    for _ in verification.steps():
        pass
    return compare(verification.saved, verification.again())


def compare(saved: checkpoint.Checkpoint, again: checkpoint.Checkpoint) -> list[str]:
    """Return a line for each thing in which two checkpoints differ; none if they are the same.

    Weights come first, then moments, merges and streams. The position of ``inference`` is left out:
    it says how much text was asked for, which changes nothing else.
    """
    names = [*checkpoint.PARAMETERS, *sorted(again.tensors.keys() - set(checkpoint.PARAMETERS))]
    found = [_compare(name, saved.tensors.get(name), again.tensors[name]) for name in names]
    found += [f"tensor {name}: not there" for name in saved.tensors.keys() - again.tensors.keys()]
    if saved.tokenizer != again.tokenizer:
        found.append("tokenizer: other merges than the text gives")
    for what, there, now in (
        ("step", saved.step, again.step),
        ("stream optimizer at word", saved.streams["optimizer"], again.streams["optimizer"]),
    ):
        if there != now:
            found.append(f"{what} {there}, trained again {now}")
    return [line for line in found if line]


def _compare(name: str, saved: Any, again: Any) -> str:
    if saved is None or saved.shape != again.shape:
        shape = None if saved is None else saved.shape
        return f"tensor {name}: shape {shape}, trained again {again.shape}"
    if saved.tobytes() == again.tobytes():
        return ""
    differs = saved != again
    largest = float(np.abs(saved - again).max())
    where = ", ".join(map(str, np.argwhere(differs)[0])) if differs.any() else "the sign of a zero"
    return (
        f"tensor {name}: {np.count_nonzero(differs)} of {saved.size} numbers differ, the first at "
        f"({where}), by {largest:g} at most"
    )
