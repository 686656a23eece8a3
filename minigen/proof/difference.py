"""The first thing in which two runs, or checkpoints, differ: from the outside in.

Outside are the config, the text and the merges, which are meant to decide the weights; then the
initial weights; then the first step on which the logs part. Inside that step, trained again from a
checkpoint that both share, are its batch, loss, gradient, weights and moments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minigen.errors import MinigenError
from minigen.proof.verification import LOGGED, doubt, snapshot
from minigen.training import checkpoint
from minigen.training.checkpoint import Checkpoint
from minigen.training.config import CONFIG, Config, deciding_differences, differences, located
from minigen.training.logs import METRICS, read_lines
from minigen.training.run import Run

_PARTS = {"optimizer_position": "batch", "loss_bits": "loss", "learning_rate": "weights"}
_ANOTHER = {
    "config": "Another config: give both the same value, with --set, and train one of them again.",
    "text": "Another text: give both the same one, with --text; its SHA-256 is in minigen info.",
    "merges": (
        "One config and one text give one tokenizer: one of the files was changed, or the library "
        "tokenizers learned otherwise; minigen verify A and minigen verify B say where."
    ),
    "step": "One has been trained longer, and as far as both go they are the same: nothing to do.",
}


@dataclass(frozen=True)
class Difference:
    """One thing that differs, and what it is on either side."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    """What was found, outermost first.

    ``first_step`` is the step on which the two part and ``first_part`` the part of it, where these
    can be told; ``advice`` says what to do next; ``free`` lists the keys that differ and decide
    nothing.
    """

    differences: list[Difference]
    first_step: int | None
    first_part: str | None
    advice: str
    free: list[str]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


class Side:
    """A run folder, or a checkpoint: its latest state, its other checkpoints and its log."""

    def __init__(self, path: str | Path):
        self.path = checkpoint.locate(path)
        self.latest = checkpoint.load(self.path)
        self.config = Config.from_dict(self.latest.config, source=str(self.path), is_saved=True)
        doubt(self.path, self.latest)
        folder = self.path.parent
        beside = checkpoint.by_step(folder) if (folder / CONFIG).is_file() else {}
        if self.path not in beside.values():  # its name is not one of the run's
            beside = {}
        self.files = {step: file for step, file in beside.items() if step < self.latest.step}
        self.files[self.latest.step] = self.path
        lines = read_lines(folder / METRICS) if beside else []
        self.log = {line["step"]: line for line in lines if line["step"] <= self.latest.step}

    def at(self, step: int) -> Checkpoint:
        """Return its checkpoint of a step."""
        if step == self.latest.step:
            return self.latest
        return checkpoint.load(self.files[step])


def compare(a_path: str | Path, b_path: str | Path) -> Comparison:
    """Compare two runs or checkpoints; MinigenError where a file cannot be read."""
    a, b = Side(a_path), Side(b_path)
    found = list(_outside(a, b))
    common = sorted(a.files.keys() & b.files.keys())
    step, inside = _first_step(a, b, common)
    part, advice = None, ""
    if found:
        advice = _ANOTHER[found[0].what.partition(" ")[0]]
    elif step is not None:
        part, advice = _first_part(a, b, common, step)
    found += inside
    if not found and a.latest.step != b.latest.step:
        found.append(Difference("step", a.latest.step, b.latest.step))
        advice = _ANOTHER["step"]
    deciding = {key for key, _, _ in deciding_differences(a.config, b.config)}
    free = [key for key, _, _ in differences(a.config, b.config) if key not in deciding]
    return Comparison(found, step, part, advice, free)


def _outside(a: Side, b: Side) -> Iterator[Difference]:
    """Yield what is meant to decide the weights, where it differs."""
    for key, left, right in deciding_differences(a.config, b.config):
        yield Difference(f"config {key}", left, right)
    if a.latest.format != b.latest.format:
        yield Difference("config format", a.latest.format, b.latest.format)
    texts = a.latest.corpus_sha256, b.latest.corpus_sha256
    if not (a.latest.has_text(texts[1]) or b.latest.has_text(texts[0])):
        yield Difference("text (its SHA-256)", *texts)
    merges = [side.latest.tokenizer["merges"] for side in (a, b)]
    if merges[0] != merges[1]:
        pairs = [[*of, *[None] * (max(map(len, merges)) - len(of))] for of in merges]
        number = next(i for i, (x, y) in enumerate(zip(*pairs, strict=True)) if x != y)
        yield Difference(f"merges (the first is merge {number})", *(of[number] for of in pairs))


def _first_step(a: Side, b: Side, common: list[int]) -> tuple[int | None, list[Difference]]:
    """Return the step on which the two part, by logs or checkpoints, and what differs there."""
    logged = sorted(a.log.keys() & b.log.keys())
    by_log = {step: _of_log(a.log[step], b.log[step], step) for step in logged}
    first_log = next((step for step in logged if by_log[step]), None)
    for step in common:
        if first_log is not None and step >= first_log:
            break  # the log is nearer to the cause
        if inside := _of_tensors(a.at(step), b.at(step), step):
            return step, inside
    return first_log, [] if first_log is None else by_log[first_log]


def _of_log(a: dict[str, Any], b: dict[str, Any], step: int) -> list[Difference]:
    return [
        Difference(f"{key} of step {step}", a[key], b[key])
        for key in sorted(LOGGED, key=lambda key: key != "optimizer_position")  # the cause first
        if key in a and key in b and a[key] != b[key]
    ]


def _of_tensors(a: Checkpoint, b: Checkpoint, step: int) -> list[Difference]:
    where = f"after step {step}" if step else "at the start"
    found = []
    if a.streams["optimizer"] != b.streams["optimizer"]:
        places = (a.streams["optimizer"], b.streams["optimizer"])
        found.append(Difference(f"stream optimizer {where}", *places))
    for name in (*checkpoint.PARAMETERS, *sorted(a.tensors.keys() - set(checkpoint.PARAMETERS))):
        if difference := _of_tensor(name, where, a.tensors[name], b.tensors.get(name)):
            found.append(difference)
    return found


def _of_tensor(name: str, where: str, a: Any, b: Any) -> Difference | None:
    kind = "tensor" if "." in name or where != "at the start" else "initial weights"
    if b is None or a.shape != b.shape:
        other = None if b is None else list(b.shape)
        return Difference(f"{kind} {name} {where}", list(a.shape), other)
    if a.tobytes() == b.tobytes():
        return None
    bits = a.view(np.int64) != b.view(np.int64)
    first = tuple(np.argwhere(bits)[0].tolist())
    place = ", ".join(map(str, first))
    what = f"{kind} {name} {where} ({np.count_nonzero(bits)} numbers, the first at {place})"
    return Difference(what, float(a[first]).hex(), float(b[first]).hex())


def _first_part(a: Side, b: Side, common: list[int], step: int) -> tuple[str, str]:
    """Train the step again from what both share, if anything; name the part, and what to do."""
    by_log = _of_log(a.log.get(step, {}), b.log.get(step, {}), step)
    shared = [c for c in common if c < step and not _of_tensors(a.at(c), b.at(c), c)]
    start = shared[-1] if shared else None
    part = "weights"
    if by_log:
        part = _PARTS.get(by_log[0].what.partition(" ")[0], part)
        if part == "loss" and start != step - 1 and _stays_apart(a, b, common, step):
            part = "weights"  # before it: a loss alone would leave what comes after as it is
    elif step:
        part = _part_of(a.at(step), b.at(step))
    if start is None and step:
        return part, _told(None, step)
    try:
        run = _again(a, b, start)
        records = {record.step: record for record in run.steps(step - run.step)}
    except MinigenError as error:
        return part, f"It could not be trained again: {error}. {_told(None, step)}"
    if by_log:
        new = records[step].metrics()
        rights = [not _of_log(side.log[step], new, step) for side in (a, b)]
    else:
        now = snapshot(run)
        rights = [not _of_tensors(side.at(step), now, step) for side in (a, b)]
    return part, _told(rights, step)


def _stays_apart(a: Side, b: Side, common: list[int], step: int) -> bool:
    """Whether what comes after a step differs too, as far as it is there to see."""
    if any(c >= step and not _of_tensors(a.at(c), b.at(c), c) for c in common):
        return False
    after = [side.log.get(step + 1) for side in (a, b)]
    return None in after or bool(_of_log(after[0] or {}, after[1] or {}, step + 1))


def _part_of(a: Checkpoint, b: Checkpoint) -> str:
    """Name the part of a step whose loss is the same and whose end is not."""
    if a.streams["optimizer"] != b.streams["optimizer"]:
        return "batch"
    names = {
        name for name, tensor in a.tensors.items() if tensor.tobytes() != b.tensors[name].tobytes()
    }
    weights = names & set(checkpoint.PARAMETERS)
    moments = names - weights
    if not moments:
        return "weights"
    # A gradient leaves its mark on weights and moments of a tensor alike.
    both = {name.rpartition(".")[2] for name in moments} & weights
    return "gradient" if both else "moments"


def _again(a: Side, b: Side, start: int | None) -> Run:
    """Return the run at a checkpoint of both; without one, as the config makes it."""
    config = located(a.config, a.path)
    if config.corpus.text == "external":
        config = config.override({"corpus.text": located(b.config, b.path).corpus.text})
    config = config.override({"sampling.every": 0})
    run = Run(config) if start is None else Run.load(a.files[start], config=config)
    run.read_corpus()
    return run


def _told(rights: list[bool] | None, step: int) -> str:
    """Say what to do next, by which of the two has what training the step again gave."""
    if rights is None:
        return (
            "There is no checkpoint of both to train that step again from: minigen verify A and "
            "minigen verify B say which of them is what its config gives."
        )
    what = f"step {step}" if step else "the start"
    if rights[0] == rights[1]:
        return (
            f"Neither has what {what} is when it is trained again here: both files were changed, "
            "or this machine does not compute right, which minigen prove shows."
        )
    right, wrong = "AB" if rights[0] else "BA"
    return (
        f"Trained again here, {what} is as {right} has it. Train {wrong} again where it was made: "
        f"if it then is as {right}, its file was changed or damaged; if it is not, that machine "
        "does not compute right, which minigen prove shows there."
    )
