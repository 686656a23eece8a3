"""The whole model as everybody writes it, with ``@`` and ``np.exp``: from a text to another text.

One story, to be read from top to bottom; it needs numpy alone. "Exact:" names what does the same in
minigen, to be read beside it: there the bits agree on every machine, and here nothing sees to that.
``minigen prove`` takes this model as its control: wherever it cannot tell the two apart, it fails.
``python minigen/proof/plain.py`` tells the story, in half a minute.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Parameters = dict[str, Floats]  # E (V, D), W (D, K, V), b (V,); gradients and moments likewise

END = 256  # <|endoftext|>; below it, a token is a byte. Exact: text.tokenizer.ByteTokenizer


# ── 1. A text becomes predictions ────────────────────────────────────────────────────────────────


def predictions(documents: Sequence[bytes], K: int) -> tuple[Integers, Integers]:
    """Return contexts (N, K), oldest token first, and the token that followed each, (N,).

    Every document starts from nothing, K times END, and its last target is END. Exact:
    text.corpus.Tokens.contexts_and_targets.
    """
    contexts, targets = [], []
    for document in documents:
        tokens = [END] * K + list(document) + [END]
        for i in range(K, len(tokens)):
            contexts.append(tokens[i - K : i])
            targets.append(tokens[i])
    return np.array(contexts), np.array(targets)


# ── 2. A context becomes logits ──────────────────────────────────────────────────────────────────


def new_parameters(V: int, K: int, D: int, rng: np.random.Generator) -> Parameters:
    """Draw an embedding E and an output head W, one map per context position; the bias is 0.

    Exact: model.model.Model.initialize.
    """
    bound = 1.0 / np.sqrt(K * D)
    E, W = rng.uniform(-1.0, 1.0, (V, D)), rng.uniform(-bound, bound, (D, K, V))
    return {"E": E, "W": W, "b": np.zeros(V)}


def hidden(E: Floats, contexts: Integers) -> Floats:
    """Put the embeddings of a context side by side: (N, K) → (N, K·D).

    Exact: model.model.Model.hidden.
    """
    return E[contexts].reshape(len(contexts), -1)


def head(W: Floats) -> Floats:
    """Return the output head as one matrix: (D, K, V) → (K·D, V)."""
    return W.transpose(1, 0, 2).reshape(-1, W.shape[2])


def logits(parameters: Parameters, contexts: Integers) -> Floats:
    """Logits, z = h·W + b: (N, K) → (N, V).

    Exact: model.head.project, and by another way, with the same bits, model.model.Model.logits.
    """
    z: Floats = hidden(parameters["E"], contexts) @ head(parameters["W"]) + parameters["b"]
    return z


# ── 3. Logits become a loss ──────────────────────────────────────────────────────────────────────


def softmax(z: Floats) -> Floats:
    """Probabilities, exp(z)/Σ exp(z): (N, V) → (N, V).

    Exact: model.head.integer_weights, integers w with p = w/S.
    """
    exp = np.exp(z - z.max(axis=1, keepdims=True))
    p: Floats = exp / exp.sum(axis=1, keepdims=True)
    return p


def loss_and_gradient(
    parameters: Parameters, contexts: Integers, targets: Integers
) -> tuple[float, Parameters]:
    """Σ −ln p of what came, in nats, and its derivatives, summed over N predictions.

    Of the logits it is p − 1[y]; the rest is the chain rule. Exact: model.gradient.Batch.
    """
    E, W = parameters["E"], parameters["W"]
    D, K, V = W.shape
    d = softmax(logits(parameters, contexts))  # (N, V)
    came = np.arange(len(targets)), targets
    loss = float(-np.log(d[came]).sum())
    d[came] -= 1.0  # now ∂L/∂z
    dW = (hidden(E, contexts).T @ d).reshape(K, D, V).transpose(1, 0, 2)
    dh = (d @ head(W).T).reshape(-1, K, D)
    dE = np.zeros_like(E)
    np.add.at(dE, contexts, dh)  # each embedding gathers from wherever it stood
    return loss, {"E": dE, "W": dW, "b": d.sum(axis=0)}


# ── 4. The gradient becomes better parameters ────────────────────────────────────────────────────


def adamw(p: Floats, g: Floats, m: Floats, v: Floats, t: int, rate: float) -> None:
    """One AdamW update of a parameter and its moments, in place; t counts from 1.

    Exact: model.rules.adamw.
    """
    m += (1 - 0.9) * (g - m)
    v += (1 - 0.99) * (g**2 - v)
    p *= 1 - rate * 0.1  # weight decay
    p -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)


def train(
    parameters: Parameters, contexts: Integers, targets: Integers, batches: Any, rate: float
) -> Iterator[float]:
    """Take a step for each batch, the numbers of its predictions; yield its mean loss in nats.

    Exact: training.run.Run.steps.
    """
    moments = {name: (np.zeros_like(p), np.zeros_like(p)) for name, p in parameters.items()}
    for t, batch in enumerate(batches, start=1):
        loss, gradient = loss_and_gradient(parameters, contexts[batch], targets[batch])
        for name, p in parameters.items():
            adamw(p, gradient[name] / len(batch), *moments[name], t, rate)
        yield loss / len(batch)


# ── 5. The parameters write a text ───────────────────────────────────────────────────────────────


def generate(parameters: Parameters, prompt: bytes, temperature: float, draws: Any) -> bytes:
    """Continue a prompt, by a token for each draw from [0, 1), until END.

    Exact: decoding.generation.generate, and the choice decoding.policy.draw.
    """
    K = parameters["W"].shape[1]
    tokens = [END] * K + list(prompt)
    for u in draws:
        p = softmax(logits(parameters, np.array([tokens[-K:]])) / temperature)[0]
        token = int((p.cumsum() > u).argmax())
        if token == END:
            break
        tokens.append(token)
    return bytes(tokens[K + len(prompt) :])


def main(steps: int = 1000) -> None:
    """Tell the story: fables in, a fable out."""
    rng = np.random.default_rng(0)
    text = (Path(__file__).parents[1] / "corpora" / "fables.txt").read_bytes()
    contexts, targets = predictions(text.split(b"\n\n"), K=8)
    parameters = new_parameters(V=257, K=8, D=16, rng=rng)
    batches = (rng.integers(len(targets), size=256) for _ in range(steps))
    for step, loss in enumerate(train(parameters, contexts, targets, batches, rate=0.01), start=1):
        if step == 1 or step % 250 == 0:
            print(f"step {step}: loss {loss:.4f} nats per token")
    written = generate(parameters, b"Once", 0.5, rng.random(200))
    print("Once" + written.decode(errors="replace"))


if __name__ == "__main__":
    main()
