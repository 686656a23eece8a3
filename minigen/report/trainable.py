"""What a page needs to train its run again: the tokens of the text, settings, and what came out."""

import base64
from contextlib import suppress
from typing import Any

import numpy as np

from minigen.errors import MinigenError
from minigen.model.rules import OPTIMIZERS
from minigen.report.facts import Facts, twin_policy
from minigen.training import checkpoint

MOST_TOKEN_BYTES = 2_000_000
"""Above this the text's token ids do not travel in the page, and it cannot train."""

MOST_STATE_BYTES = 6_000_000
"""So much of checkpoints, with their moments, travels in the page to train on from."""

_TWINS_OPTIMIZERS = ("adamw", "sgd")
_TWINS_KEYS = {"name", "learning_rate", "betas", "momentum", "weight_decay", "gradient_clip",
               "warmup_steps", "decay"}  # fmt: skip
_PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_DEFAULT_SAMPLES = 6  # of a run that took none, for the mistake to have something to show


def training_data(facts: Facts) -> dict[str, Any]:
    """Return what ``twin.Run`` takes, or ``missing``: why there is none."""
    config, saved = facts.config, facts.saved
    if saved.format != checkpoint.FORMAT:
        return {
            "missing": f"This run was trained with the arithmetic of format {saved.format}; this "
            f"page trains with that of format {checkpoint.FORMAT}."
        }
    if facts.corpus is None:
        return {"missing": f"{facts.missing['corpus']} So there is nothing to train on here."}
    if config.optimizer.name not in _TWINS_OPTIMIZERS:
        return {"missing": f"The page cannot train with {config.optimizer.name}."}
    settings = config.optimizer.model_dump()
    if unknown := settings.keys() - _TWINS_KEYS:
        return {"missing": f"The page cannot train with optimizer.{min(unknown)}."}
    tokens = facts.corpus.training
    width = 2 if facts.tokenizer.vocab_size <= 1 << 16 else 4
    size = len(tokens) + 1
    if size * width > MOST_TOKEN_BYTES:
        return {
            "missing": f"The text to train on is {size:,} tokens. Above "
            f"{MOST_TOKEN_BYTES // width:,} of them it does not travel in the page, "
            "which can then not train."
        }
    V, D = saved.tensors["E"].shape
    lines = facts.metrics[: saved.step]
    if [line["step"] for line in lines] != [*range(1, len(lines) + 1)] or len(lines) < saved.step:
        lines = []  # a log with holes is none to compare with
    fingerprints = {line["step"]: line["fingerprint"] for line in lines if "fingerprint" in line}
    fingerprints[saved.step] = facts.fingerprint
    return {
        "seed": str(config.run.seed),
        "shape": [V, config.model.context_length, D],
        "batch_size": config.training.batch_size,
        "steps": config.training.steps,
        "step": saved.step,
        "optimizer": settings,
        "tokens": packed(tokens.array, f"<u{width}"),
        "token_bytes": width,
        "tokens_count": size,
        "losses": packed([float.fromhex(line["loss_bits"]) for line in lines]) if lines else None,
        "learning_rates": packed([line["learning_rate"] for line in lines]) if lines else None,
        "fingerprints": sorted(fingerprints.items()),
        "checkpoints": _checkpoints(facts),
        "sampling": _sampling(facts),
    }


def packed(numbers: Any, dtype: str = "<f8") -> str:
    """Return the bytes of numbers, little-endian, as the page carries them."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=dtype).tobytes()).decode()


def _checkpoints(facts: Facts) -> list[dict[str, Any]]:
    """Weights and moments of the folder's steps before the last one, newest first, if they fit."""
    kept: list[dict[str, Any]] = []
    room = MOST_STATE_BYTES
    moments = OPTIMIZERS[facts.config.optimizer.name].moments
    names = [
        f"{prefix}{name}"
        for prefix in ("", *(f"{moment}." for moment in moments))
        for name in checkpoint.PARAMETERS
    ]
    files = checkpoint.by_step(facts.folder) if facts.folder else {}
    for _, path in sorted(files.items(), reverse=True):
        room -= path.stat().st_size
        if room < 0:
            break
        with suppress(MinigenError):  # a damaged one is no start; the page can do without
            saved = checkpoint.load(path)
            if 0 < saved.step < facts.saved.step and saved.tensors.keys() >= {*names}:
                state = np.concatenate([saved.tensors[name].reshape(-1) for name in names])
                kept.insert(0, {"step": saved.step, "state": packed(state)})
    return kept


def _sampling(facts: Facts) -> dict[str, Any]:
    """Return how samples are taken where they make the classic mistake; as the run's, if it can."""
    table = facts.config.sampling
    policy = twin_policy(facts.config)
    is_own = policy is not None and not table.policy.greedy
    return {
        "every": table.every or max(1, facts.saved.step // _DEFAULT_SAMPLES),
        "prompt": table.prompt,
        "policy": policy if is_own else _PLAIN,
        "is_own": is_own and table.every > 0,
        "max_new_tokens": table.max_new_tokens,
        "merges": facts.tokenizer.state()["merges"],
    }
