"""`docs/vectors.json` holds what docs/specification.md says must come out; both languages do it.

`python -m tests.report.test_vectors` writes the file anew.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigen.decoding.generation import Task, complete, generate
from minigen.decoding.policy import Policy
from minigen.exact import arithmetic
from minigen.exact.streams import Stream
from minigen.model import head, optimizer
from minigen.model.model import Model
from minigen.text import corpus
from minigen.text.tokenizer import ByteTokenizer
from minigen.training import checkpoint
from minigen.training.config import Config
from minigen.training.run import Run
from tests.report.asking import ask, needs_node

FILE = Path(__file__).parents[2] / "docs" / "vectors.json"
TEXT = "Once a fox saw a crow.\n\nOnce a crow saw a fox, and the fox saw that the crow saw.\n" * 9


def bits(x: Any) -> Any:
    """Floats as 16 hexadecimal digits, the most significant first."""
    if np.ndim(x) == 0:
        return np.array(x, ">f8").tobytes().hex()
    return [bits(value) for value in np.reshape(x, -1)]


def unbits(x: Any) -> Any:
    if isinstance(x, str):
        return float(np.frombuffer(bytes.fromhex(x), ">f8")[0])
    return np.array([unbits(value) for value in x])


def digest(x: Any) -> str:
    """SHA-256 of floats, too many to list, as little-endian bytes; -0 counts as 0."""
    return hashlib.sha256(np.ascontiguousarray(x + 0.0, "<f8").tobytes()).hexdigest()


# Each part of the specification, from what is given to what comes out


def stream(given: Any) -> Any:
    def words() -> Stream:
        return Stream(int(given["seed"]), given["name"], given["position"])

    return {
        "words": [f"{int(word):016x}" for word in words().words(5)],
        "integers": words().integers(5, given["below"]).tolist(),
        "uniforms": bits(words().uniforms(5)),
    }


def exponential(given: Any) -> Any:
    return [int(w) for w in arithmetic.integer_exp(unbits(given["gaps"]), given["B"])]


def logarithm(given: Any) -> Any:
    return bits(arithmetic.log(unbits(given["x"])))


def cosine(given: Any) -> Any:
    return bits(arithmetic.cos(unbits(given["x"])))


def grid(given: Any) -> Any:
    integers, unit = arithmetic.round_to_grid(unbits(given["x"]), given["bits"])
    return {"unit": bits(unit), "integers": [int(i) for i in integers]}


def documents(given: Any) -> Any:
    files = given["text"]
    text = corpus.from_memory(
        [*map(bytes.fromhex, files)] if isinstance(files, list) else bytes.fromhex(files),
        documents=given["documents"],
        validation_fraction=given["validation_fraction"],
        vocab_size=given["vocab_size"],
    )
    return {
        "merges": text.tokenizer.state()["merges"],
        "training": text.training.array.tolist(),
        "validation": text.validation.array.tolist(),
        "sha256": text.sha256,
    }


def encoding(given: Any) -> Any:
    tokenizer = ByteTokenizer([(left, right) for left, right in given["merges"]])
    return [tokenizer.encode(bytes.fromhex(text)).ids for text in given["texts"]]


def model_of(given: Any) -> Model:
    """The initial weights of a seed, times a size."""
    made = Model(*given["shape"])
    made.initialize(Stream(int(given["seed"]), "init"))
    made.flat *= given["times"]
    made.changed()
    return made


def model(given: Any) -> Any:
    made = model_of(given)
    logits = made.logits(np.array([given["context"]]))[0]
    w, S = head.integer_weights(logits)
    return {
        "fingerprint": checkpoint.fingerprint(made.parameters),
        "E_first": bits(made.flat[:3]),
        "logits_first": bits(logits[:3]),
        "logits_sha256": digest(logits),
        "w_first": [int(weight) for weight in w[:3]],
        "S": int(S[0]),
    }


def gradient(given: Any) -> Any:
    made, N = model_of(given), len(given["targets"])
    contexts, targets = np.array(given["contexts"]), np.array(given["targets"])
    statistics = made.statistics(contexts, targets, N)
    flat = made.gradient(statistics)
    q, a = head.gradient_bits(N, contexts.shape[1])
    parts = {f"d{name}": view for name, view in made.views(flat).items()}
    return {
        "q": q,
        "a": a,
        "loss": bits(statistics.mean_loss),
        "db_first": bits(parts["db"][:3]),
        **{f"{name}_sha256": digest(part) for name, part in parts.items()},
    }


def norm(given: Any) -> Any:
    return bits(optimizer.norm(unbits(given["x"])))


def schedule(given: Any) -> Any:
    made = optimizer.Optimizer(1, total_steps=given["steps"], **given["optimizer"])
    return bits([made.learning_rate(step) for step in range(1, given["steps"] + 1)])


def update(given: Any) -> Any:
    weights = unbits(given["weights"])
    made = optimizer.Optimizer(len(weights), total_steps=given["steps"], **given["optimizer"])
    after = []
    for step in given["gradients"]:
        weights = made.update(weights, unbits(step))
        after.append({"weights": bits(weights), "moments": bits(list(made.moments.values()))})
    return after


def run_of(given: Any) -> Run:
    return Run(Config.load("fables", given["config"]), text=given["text"])


def run(given: Any) -> Any:
    made = run_of(given)
    records = made.train()
    sample = given["sample"]
    policy, length = Policy(**sample["policy"]), sample["max_new_tokens"]
    task = Task(made.model, made.tokenizer, policy, max_new_tokens=length)
    pieces = generate(task, [sample["prompt"]], lambda _: Stream(int(sample["seed"]), "inference"))
    return {
        "losses": bits([record.loss for record in records]),
        "learning_rates": bits([record.learning_rate for record in records]),
        "fingerprint": made.fingerprint,
        "sample": complete(pieces)[0].token_ids,
    }


PARTS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function
    for function in (
        stream, exponential, logarithm, cosine, grid, documents, encoding, model, gradient,
        norm, schedule, update, run,
    )
}  # fmt: skip
PYTHON_ALONE = {"documents"}  # the twin is given the tokens and merges


# What is given


ADAMW = {
    "name": "adamw", "learning_rate": 0.02, "betas": [0.9, 0.99], "momentum": 0.9,
    "weight_decay": 0.1, "gradient_clip": 0.5, "warmup_steps": 2, "decay": "cosine",
}  # fmt: skip
SGD = {**ADAMW, "name": "sgd", "gradient_clip": 0.0, "decay": "linear"}
RUN = {  # whole: what another version has as its defaults may differ
    "corpus.documents": "paragraph",
    "corpus.validation_fraction": 0.2,
    "tokenizer.vocab_size": 262,
    "model.context_length": 3,
    "model.embedding_dim": 4,
    "training.steps": 6,
    "training.batch_size": 24,
    "sampling.every": 0,
    "evaluation.every": 0,
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.5,
}
SAMPLE = {
    "prompt": "Once", "policy": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "seed": "5", "max_new_tokens": 12,
}  # fmt: skip


def hexadecimal(*texts: bytes) -> list[str]:
    return [text.hex() for text in texts]


def givens() -> dict[str, list[Any]]:
    """What each part is given; of a run also the tokens, for who does not cut texts."""
    x = [0.0, 1e-300, 0.3, -1.0, 1.5, 2.0**-30, -3.999999]
    texts = hexadecimal(b"", b"Once a fox", "näh, 12 x\n".encode(), bytes(range(250, 256)), b"aaaa")
    cut = {"documents": "line", "validation_fraction": 0.3, "vocab_size": 260}
    batch = {"contexts": [[256, 97], [97, 98], [256, 97]], "targets": [98, 99, 256]}
    deep = {"contexts": [[n * k % 5 for k in range(7)] for n in range(20)], "targets": [*range(20)]}
    runs = [
        {"text": TEXT, "config": {**RUN, "run.seed": 1}, "sample": SAMPLE},
        {
            "text": TEXT,
            "config": {
                **RUN,
                "optimizer.name": "sgd",
                "optimizer.decay": "linear",
                "optimizer.gradient_clip": 0.05,
                "optimizer.warmup_steps": 2,
            },
            "sample": {**SAMPLE, "policy": {"temperature": 0.0}},
        },
    ]
    for given in runs:
        made = run_of(given)
        given["given_tokens"] = made.read_corpus().training.array.tolist()
        given["given_merges"] = made.tokenizer.state()["merges"]
    return {
        "stream": [
            {"seed": "0", "name": "optimizer", "position": 0, "below": 1000},
            {"seed": "12345678901234567890", "name": "inference/1", "position": 7, "below": 257},
        ],
        "exponential": [
            {"gaps": bits([0.0, 0.5, 1.0, 20.0, 29.9, 31.0, np.inf]), "B": 43},
            {"gaps": bits([0.0, 1e-9, 0.69, 12.0]), "B": 20},
        ],
        "logarithm": [{"x": bits([1.0, 1.5, 2.0, 0.7071067811865475, 257.0, 1e10])}],
        "cosine": [{"x": bits([0.0, 0.1, 1.5707963267948966, 3.0, 3.141592653589793])}],
        "grid": [{"x": bits(x), "bits": size} for size in (17, 22)]
        + [{"x": bits([0.5, 0.25]), "bits": 3}],
        "documents": [
            {**cut, "text": TEXT.encode().hex()},
            {**cut, "documents": "paragraph", "text": b"ab\r\n \r\n\r\ncd\n\nef\n".hex()},
            {**cut, "documents": "file", "vocab_size": 257, "text": "äbcdefgh".encode().hex()},
            {**cut, "documents": "file", "text": hexadecimal(b"a fox\n", b"a crow\r\na crow\n")},
        ],
        "encoding": [
            {"merges": [], "texts": texts},
            {"merges": [[32, 97], [79, 110], [97, 97], [257, 97]], "texts": texts},
        ],
        "model": [
            {"seed": "3", "shape": [257, 2, 3], "times": 1.0, "context": [256, 97]},
            {"seed": "4", "shape": [300, 1, 5], "times": 40.0, "context": [299]},
        ],
        "gradient": [
            {"seed": "3", "shape": [257, 2, 3], "times": 1.0, **batch},
            {"seed": "9", "shape": [258, 7, 2], "times": 20.0, **deep},
        ],
        "norm": [{"x": bits(x)}, {"x": bits([3.0, 4.0])}, {"x": bits([0.1] * 1000)}],
        "schedule": [
            {"steps": 9, "optimizer": {**ADAMW, "decay": decay, "warmup_steps": warmup}}
            for decay, warmup in (("constant", 0), ("linear", 3), ("cosine", 2), ("cosine", 12))
        ],
        "update": [
            {
                "steps": 4,
                "optimizer": options,
                "weights": bits(x),
                "gradients": [bits([1e-130, 0.1, -0.3, 0.0, 2.0, 1e-3 * n, 0.7]) for n in range(3)],
            }
            for options in (ADAMW, SGD)
        ],
        "run": runs,
    }


def written() -> dict[str, Any]:
    return {
        name: [{"given": given, "gives": PARTS[name](given)} for given in cases]
        for name, cases in givens().items()
    }


def as_text(vectors: dict[str, Any]) -> str:
    """A case a line."""
    parts = []
    for name, cases in vectors.items():
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PARTS)
def test_python_gives_what_the_vectors_say(name):
    for case in read()[name]:
        assert PARTS[name](case["given"]) == case["gives"]


@needs_node
@pytest.mark.parametrize("name", sorted(PARTS.keys() - PYTHON_ALONE))
def test_the_twin_gives_what_the_vectors_say(name):
    cases = read()[name]
    givens = [case["given"] for case in cases]
    for given in givens:
        if name == "run":
            given |= twin_run(given)
    answers = ask("vectors", name=name, givens=givens)
    for case, answer in zip(cases, answers, strict=True):
        assert answer == case["gives"]


def twin_run(given: Any) -> Any:
    """A run's config as the twin takes it."""
    config = Config.load("fables", given["config"])
    V = 257 + len(given["given_merges"])
    return {
        "data": {
            "seed": str(config.run.seed),
            "shape": [V, config.model.context_length, config.model.embedding_dim],
            "batch_size": config.training.batch_size,
            "steps": config.training.steps,
            "optimizer": config.optimizer.model_dump(),
            "tokens": coded_ids(given["given_tokens"]),
            "token_bytes": 2,
        }
    }


def coded_ids(ids: list[int]) -> str:
    return base64.b64encode(np.array(ids, "<u2").tobytes()).decode()


def test_the_file_is_what_the_givens_in_here_make():
    assert FILE.read_text(encoding="utf-8") == as_text(written())


if __name__ == "__main__":
    FILE.write_text(as_text(written()), encoding="utf-8")
