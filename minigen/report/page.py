"""A report is one HTML page about a run: its charts, and its generation once more in JavaScript.

The page needs nothing but itself: data, charts' library and the twin (``twin.js``) travel inside.
Whatever comes from a model or a file goes in as JSON and is shown as text, never as markup.
"""

import base64
import hashlib
import json
import shlex
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from minigen import files
from minigen.arguments import checked
from minigen.decoding.scoring import baselines
from minigen.errors import MinigenError
from minigen.exact.arithmetic import log
from minigen.report.facts import Facts, gather, occurring, token_label, twin_policy
from minigen.report.projection import principal_coordinates
from minigen.report.trainable import packed, training_data
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import BYTE_VOCABULARY, END_OF_TEXT
from minigen.training import checkpoint
from minigen.training.config import Config, differences
from minigen.training.keys import KEYS
from minigen.training.logs import Line

MOST_WEIGHT_BYTES = 8_000_000
"""Above this the weights do not travel in the page, and so the twin is left out."""

_MOST_POINTS = 1500  # of a chart's line
_MOST_SAMPLES = 500
_MOST_TOKENS = 2000  # of the embedding: those learned first


def require() -> None:
    """Raise MinigenError unless the libraries that draw the charts are installed."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise MinigenError(f"a report needs {' and '.join(missing)}: pip install 'minigen[report]'")


@checked
def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about a run folder, or a checkpoint file, and return where it is.

    ``out`` defaults to ``report.html`` in the folder, or beside the checkpoint under its name. The
    same run under the same name gives the same bytes. What a folder does not tell is left out, and
    the page says so.
    Raises MinigenError where the run is damaged or a library is missing (see ``require``).
    """
    require()
    run = Path(run)
    facts = gather(run)
    if out is None:
        out = run / "report.html" if run.is_dir() else run.with_suffix(".html")
    files.write_atomically(out, _page(_data(facts)).encode())
    return Path(out)


def _page(data: dict[str, Any]) -> str:
    """Fill the template; the policy in its head lets no script run but these, and no request."""
    from minigen.report import charts

    scripts = {
        "library": charts.bundle(),
        "twin": _resource("twin.js"),
        "script": _resource("page.js"),
    }
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values())
    return Template(_resource("page.html")).substitute(
        scripts, hashes=hashes, style=_resource("page.css"), data=_json(data)
    )


def _resource(name: str) -> str:
    return resources.files("minigen.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(data: dict[str, Any]) -> str:
    """JSON that no HTML parser can take for markup, and pure ASCII."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _data(facts: Facts) -> dict[str, Any]:
    saved, tokenizer = facts.saved, facts.tokenizer
    E, W = saved.tensors["E"], saved.tensors["W"]
    V, D = E.shape
    size = sum(saved.tensors[name].size for name in checkpoint.PARAMETERS)
    has_twin = 8 * size <= MOST_WEIGHT_BYTES
    return {
        "name": facts.name,
        "fingerprint": facts.fingerprint,
        "step": saved.step,
        "shape": [V, W.shape[1], D],
        "parameters": size,
        "batchSize": facts.config.training.batch_size,
        "seed": str(facts.config.run.seed),
        "prompt": facts.config.sampling.prompt,
        "policy": twin_policy(facts.config),
        "missing": dict(facts.missing),
        "doubt": facts.doubt,
        "labels": [token_label(tokenizer, token) for token in range(V)] if has_twin else [],
        "merges": tokenizer.state()["merges"] if has_twin else [],
        "weights": _weights(facts) if has_twin else None,
        "loss": _loss(facts),
        "samples": _samples(facts),
        "samplesTaken": len(facts.samples),
        "repeatable": _repeatable_sample(facts),
        "streams": _streams(facts),
        "embedding": _embedding(facts),
        "reproduce": _reproduce(facts),
        "training": _training(facts),
        "logged": facts.metrics_of(saved.step).get("fingerprint"),
    }


def _weights(facts: Facts) -> str:
    tensors = (facts.saved.tensors[name] for name in checkpoint.PARAMETERS)
    return packed(np.concatenate([tensor.reshape(-1) for tensor in tensors]))


def _thinned(metrics: list[Line]) -> list[Line]:
    """Every n-th line, those with a validation loss, and the last."""
    every = -(-len(metrics) // _MOST_POINTS)
    last = len(metrics) - 1
    return [
        line
        for i, line in enumerate(metrics)
        if (i + 1) % every == 0 or i in (0, last) or "validation_loss" in line
    ]


def _bits_per_nat(tokens: Tokens | None) -> float | None:
    """Bits per byte that one nat per token is; None where the text is not known."""
    if tokens is None or not len(tokens) or not tokens.bytes:
        return None
    return len(tokens) / (tokens.bytes * float(log(2.0)))


def _entropies(tokens: Tokens | None, vocab_size: int) -> dict[str, float]:
    """Nats per token that tables of counts of these very tokens would reach, if there are any."""
    if tokens is None or not len(tokens):
        return {}
    known = baselines(tokens, vocab_size)
    return {f"{name} entropy": known[name] for name in ("unigram", "bigram")}


def _loss(facts: Facts) -> dict[str, Any] | None:
    if not facts.metrics:
        return None
    from minigen.report import charts

    V = facts.tokenizer.vocab_size
    text = facts.corpus
    training, validation = (text.training, text.validation) if text else (None, None)
    lines = {"ln V: no knowledge": float(log(float(V))), **_entropies(training, V)}
    validation_lines = _entropies(validation, V)
    measured = [line for line in facts.metrics if "validation_loss" in line]
    rows: list[Line] = [
        {key: round(line[key], 5) for key in ("step", "loss", "validation_loss") if key in line}
        for line in _thinned(facts.metrics)
    ]
    steps = max(facts.config.training.steps, facts.metrics[-1]["step"])
    return {
        "chart": charts.loss(rows, steps, lines, validation_lines),
        "lines": lines,
        "validation_lines": validation_lines,
        "units": {
            "training_unit": _bits_per_nat(training),
            "validation_unit": _bits_per_nat(validation),
        },
        "last": {"step": facts.metrics[-1]["step"], "loss": facts.metrics[-1]["loss"]},
        "validation": measured[-1] if measured else None,
    }


def _training(facts: Facts) -> dict[str, Any]:
    """Return what the page trains with, and the chart in which it shows it."""
    from minigen.report import charts

    data = training_data(facts)
    if "missing" in data:
        return data
    rows = [
        {key: round(line[key], 5) for key in ("step", "loss")}
        for line in _thinned(facts.metrics[: facts.saved.step])
    ]
    highest = float(log(float(facts.tokenizer.vocab_size)))
    return {**data, "chart": charts.training(rows, facts.saved.step, highest)}


def _samples(facts: Facts) -> list[Line]:
    every = max(1, -(-len(facts.samples) // _MOST_SAMPLES))
    kept = facts.samples[::-1][::every][::-1]
    return [{key: sample[key] for key in ("step", "prompt", "text")} for sample in kept]


def _repeatable_sample(facts: Facts) -> dict[str, Any] | None:
    """Return what the twin needs to write the checkpoint's own sample again, if there is one."""
    step = facts.saved.step
    samples = [sample for sample in facts.samples if sample["step"] == step]
    before = facts.metrics_of(step - 1)
    if not samples or twin_policy(facts.config) is None or not (before or step == 1):
        return None
    return {
        "position": before.get("inference_position", 0),
        "prompt": samples[-1]["prompt"],
        "ids": samples[-1]["token_ids"],
        "length": facts.config.sampling.max_new_tokens,
    }


def _streams(facts: Facts) -> dict[str, Any] | None:
    """Where each stream drew words; the twin's are computed: it takes N a step and samples none."""
    if not facts.metrics:
        return None
    from minigen.report import charts

    N = facts.config.training.batch_size
    steps = max(facts.config.training.steps, facts.metrics[-1]["step"])
    init = facts.saved.streams.get("init", 0)
    lanes = ["init", "optimizer", "inference", "twin: optimizer", "twin: inference"]
    width = steps / 300  # what happens between steps still needs a width to be seen
    rows = [{"lane": "init", "stream": "init", "start": 0, "step": width, "words": init}]
    for stream in ("optimizer", "inference"):
        rows += _drawn(_thinned(facts.metrics), stream)
    last = facts.metrics[-1]["step"]
    twin = {"lane": "twin: optimizer", "stream": "optimizer", "start": 0, "step": last}
    rows.append({**twin, "words": N * last})
    return {
        "chart": charts.streams(rows, steps, lanes),
        "init": init,
        "optimizer": facts.metrics[-1]["optimizer_position"],
        "inference": facts.metrics[-1]["inference_position"],
        "lines": len(facts.metrics),
        "agree": all(line["optimizer_position"] == N * line["step"] for line in facts.metrics),
    }


def _drawn(metrics: list[Line], stream: str) -> list[Line]:
    """Join neighbouring steps at which a stream drew words to one bar."""
    bars: list[Line] = []
    step = position = 0
    for line in metrics:
        words = line[f"{stream}_position"] - position
        if words and bars and bars[-1]["step"] == step:
            bars[-1]["step"] = line["step"]
            bars[-1]["words"] += words
        elif words:
            bar = {"lane": stream, "stream": stream, "start": step, "step": line["step"]}
            bars.append({**bar, "words": words})
        step, position = line["step"], line[f"{stream}_position"]
    return bars


def _kind(data: bytes, token: int) -> str:
    from minigen.report.charts import KINDS

    vowel, consonant, digit, punctuation, other, merge = KINDS
    if token >= BYTE_VOCABULARY:
        return merge
    character = data.decode("latin-1")
    if not (0x20 <= token < 0x7F or character in "\n\t"):
        return other
    if character.isalpha():
        return vowel if character.lower() in "aeiou" else consonant
    return digit if character.isdigit() else punctuation


def _embedding(facts: Facts) -> dict[str, Any]:
    from minigen.report import charts

    V, tokenizer = facts.tokenizer.vocab_size, facts.tokenizer
    if facts.corpus:
        tokens = occurring(facts.corpus.training, V)
    else:
        tokens = [*range(0x20, 0x7F), *range(BYTE_VOCABULARY, V)]
    tokens = [token for token in tokens if token != END_OF_TEXT][:_MOST_TOKENS]
    coordinates, shares = principal_coordinates(facts.saved.tensors["E"][tokens])
    rows = [
        {
            "id": token,
            "token": token_label(tokenizer, token),
            "kind": _kind(tokenizer.token_bytes(token), token),
            "x": round(x, 4),
            "y": round(y, 4),
        }
        for token, (x, y) in zip(tokens, coordinates.tolist(), strict=True)
    ]
    return {
        "chart": charts.embedding(rows),
        "kinds": list(charts.KINDS),
        "occurring": sorted({row["kind"] for row in rows}),
        "tokens": len(tokens),
        "shares": [round(share, 4) for share in shares],
    }


def _reproduce(facts: Facts) -> dict[str, Any]:
    """Return the command that gives these weights again: what decides them, unless by default."""
    words = ["minigen", "train", "fables"]
    is_external = facts.config.corpus.text != "fables"
    if is_external:
        words += ["--text", "YOUR_TEXT"]
    for key, _, value in differences(Config.load("fables"), facts.config):
        if KEYS[key].decides_weights and key != "corpus.text":
            words += ["--set", f"{key}={json.dumps(value)}"]
    claim = (
        "This command trains the run again on any machine; the fingerprint it prints must be the "
        "one below, every digit of it."
    )
    notes = ["The text is the one inside the package."]
    if is_external:
        sha256 = facts.saved.corpus_sha256
        notes = [f"YOUR_TEXT stands for the text of the run, whose SHA-256 is {sha256}."]
    step, steps = facts.saved.step, facts.config.training.steps
    if step < steps:
        notes.append(f"This fingerprint is that of step {step:,} of {steps:,}.")
    if facts.saved.format == checkpoint.FORMAT:
        notes.append("Or let minigen verify train it again from the checkpoint and compare.")
    else:
        claim = (
            f"These weights were trained with the arithmetic of format {facts.saved.format}. This "
            f"command trains with that of format {checkpoint.FORMAT}, to other weights."
        )
    return {
        "claim": claim,
        "command": f"{shlex.join(words)} --out runs/again",
        "notes": " ".join(notes),
        "config": _visible(facts.config.to_toml()),
        "isExternal": is_external,
    }


def _visible(toml: str) -> str:
    """Write what no reader could see in TOML, as marks that turn the text round, by its number."""

    def shown(character: str) -> str:
        if character.isprintable() or character == "\n":
            return character
        number = ord(character)
        return f"\\U{number:08x}" if number > 0xFFFF else f"\\u{number:04x}"

    return "".join(map(shown, toml))
