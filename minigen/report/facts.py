"""What is known of a run: its checkpoint, and what its folder and its text still tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minigen.errors import MinigenError
from minigen.text import corpus
from minigen.text.corpus import Corpus, Tokens
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer
from minigen.training import checkpoint
from minigen.training.checkpoint import Checkpoint
from minigen.training.config import CONFIG, Config, located
from minigen.training.logs import METRICS, SAMPLES, Line, fault, read_lines


@dataclass(frozen=True)
class Facts:
    """A run's checkpoint and logs. ``corpus`` is None where its text is not at hand.

    ``name`` is that of the folder or of the file alone.

    ``missing`` says, for ``metrics``, ``samples`` and ``corpus``, why there are none; ``doubt``
    which log is not the one that the checkpoint vouches for.
    """

    saved: Checkpoint
    config: Config
    tokenizer: ByteTokenizer
    fingerprint: str
    metrics: list[Line]
    samples: list[Line]
    corpus: Corpus | None
    missing: Mapping[str, str]
    folder: Path | None
    name: str
    doubt: str

    def metrics_of(self, step: int) -> Line:
        """Return what the log says last of a step; nothing where it does not tell."""
        return next((line for line in reversed(self.metrics) if line["step"] == step), {})


def gather(path: Path) -> Facts:
    """Read a run folder, or a checkpoint alone. Raises MinigenError where a file is damaged."""
    file = checkpoint.locate(path)
    saved = checkpoint.load(file, moments=False)
    config = Config.from_dict(saved.config, source=str(file), is_saved=True)
    tokenizer = ByteTokenizer.from_state(saved.tokenizer)
    folder = path if path.is_dir() else None
    metrics, samples = (_checked(folder / log) if folder else [] for log in (METRICS, SAMPLES))
    missing = {}
    for name, lines, what in (
        (METRICS, metrics, "loss of each step"),
        (SAMPLES, samples, "samples of its run"),
    ):
        if not lines:
            missing[name.removesuffix(".jsonl")] = (
                f"The run folder holds no line of {name}."
                if folder
                else f"A checkpoint alone does not record the {what}."
            )
    text = None
    try:
        text = _read_text(folder, saved, config, tokenizer)
    except MinigenError as error:
        missing["corpus"] = str(error)
    fingerprint = checkpoint.fingerprint(saved.tensors)
    name = path.resolve().name if folder else path.stem
    doubt = fault(file, saved.logs) if folder else ""
    return Facts(
        saved, config, tokenizer, fingerprint, metrics, samples, text, missing, folder, name, doubt
    )


_KINDS = {
    METRICS: {
        "step": int,
        "loss": float,
        "loss_bits": str,
        "learning_rate": float,
        "optimizer_position": int,
        "inference_position": int,
        "validation_loss": float,
    },
    SAMPLES: {"step": int, "prompt": str, "text": str, "token_ids": list},
}


def _checked(path: Path) -> list[Line]:
    """Return a log's lines; what the page shows of them must be of the right kind."""
    lines, kinds = read_lines(path), _KINDS[path.name]
    for number, line in enumerate(lines, 1):
        known = {"validation_loss": 0.0, **line}  # not measured at every step
        faults = [key for key, kind in kinds.items() if type(known.get(key)) is not kind]
        if not faults and path.name == METRICS and line["loss_bits"] != line["loss"].hex():
            faults = ["loss_bits"]
        if faults:
            raise MinigenError(
                f"{path}, line {number}: {faults[0]} is missing or of the wrong kind; "
                "resuming the run mends it"
            )
    return lines


def _read_text(
    folder: Path | None, saved: Checkpoint, config: Config, tokenizer: ByteTokenizer
) -> Corpus:
    """Return the run's text. Raises MinigenError with the reason, which names no path."""
    if config.corpus.text == "external" and folder is None:
        raise MinigenError("A checkpoint alone does not say where its text lies.")
    try:
        table = located(config, folder / CONFIG).corpus if folder else config.corpus
    except MinigenError:
        raise MinigenError(f"The run folder's {CONFIG} cannot be read.") from None
    paths: Any = table.text
    if paths == "external":
        raise MinigenError("The run's text was not read from a file.")
    try:
        text = corpus.load(
            paths,
            documents=table.documents,
            validation_fraction=table.validation_fraction,
            tokenizer=tokenizer,
        )
    except MinigenError:
        raise MinigenError("The run's text is not where it was.") from None
    if not saved.has_text(text.sha256):
        raise MinigenError("The run's text has changed since: its SHA-256 is another.")
    return text


def occurring(tokens: Tokens, vocab_size: int) -> list[int]:
    """Return the ids that occur in a text, in order."""
    occurs = np.zeros(vocab_size, dtype=bool)
    for block in tokens.blocks():
        occurs[block] = True
    return [int(token) for token in np.flatnonzero(occurs)]


def twin_policy(config: Config) -> dict[str, float] | None:
    """Return the policy of a run's samples as the twin takes it; None where it cannot."""
    policy = config.sampling.policy
    options = {
        "temperature": policy.temperature,
        "top_k": policy.top_k or 0,
        "top_p": 1.0 if policy.top_p is None else policy.top_p,
        "min_p": policy.min_p or 0.0,
    }
    known = type(policy)(**{name: getattr(policy, name) for name in options})
    return options if policy == known else None


def token_label(tokenizer: ByteTokenizer, token: int) -> str:
    """Show a token: printable text as it is but for ␣ ⏎ ⇥, other bytes in hexadecimal."""
    if token == END_OF_TEXT:
        return "<|endoftext|>"
    data = tokenizer.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return shown if shown and shown.isprintable() else "".join(f"\\x{byte:02x}" for byte in data)
