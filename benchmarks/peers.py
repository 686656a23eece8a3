"""The same model and optimizer in PyTorch and JAX, each as its users would write it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

Step = Callable[[], float]

LEARNING_RATE, BETAS, WEIGHT_DECAY = 0.01, (0.9, 0.99), 0.01


class TorchModel(nn.Module):
    """Embedding and linear over K tokens."""

    def __init__(self, V: int, K: int, D: int):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.linear = nn.Linear(K * D, V)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """Logits of contexts: (N, K) → (N, V)."""
        return self.linear(self.embedding(contexts).flatten(1))


def torch_step(
    shape: tuple[int, ...], batches: list, *, compiled: bool, dtype: str = "float32"
) -> Step:
    """Return a training step with the fused optimizer, eager or through ``torch.compile``."""
    model = TorchModel(*shape).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches]

    def loss_of(contexts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(contexts), targets)

    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> float:
        data.append(data.pop(0))
        optimizer.zero_grad(set_to_none=True)
        loss = forward(*data[0])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def jax_step(shape: tuple[int, ...], batches: list, *, dtype: str = "float32") -> Step:
    """Return a training step, jitted as a whole, its state donated."""
    jax.config.update("jax_enable_x64", True)  # takes nothing from those in float32
    V, K, D = shape
    keys = jax.random.split(jax.random.PRNGKey(0))
    parameters = {
        "E": jax.random.normal(keys[0], (V, D), dtype),
        "W": jax.random.uniform(keys[1], (K * D, V), dtype, -1, 1) / float(np.sqrt(K * D)),
        "b": jnp.zeros(V, dtype),
    }
    data = [(jnp.asarray(x, jnp.int32), jnp.asarray(y, jnp.int32)) for x, y in batches]

    def loss_of(p: dict, contexts: jax.Array, targets: jax.Array) -> jax.Array:
        z = p["E"][contexts].reshape(len(contexts), -1) @ p["W"] + p["b"]
        return -jnp.take_along_axis(jax.nn.log_softmax(z), targets[:, None], axis=1).mean()

    def update(p: dict, m: dict, v: dict, t: jax.Array, x: jax.Array, y: jax.Array) -> tuple:
        loss, g = jax.value_and_grad(loss_of)(p, x, y)
        (beta1, beta2), t = BETAS, t + 1
        m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, m, g)
        v = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, v, g)
        rate, spread = LEARNING_RATE / (1 - beta1**t), 1 / jnp.sqrt(1 - beta2**t)
        keep = 1 - LEARNING_RATE * WEIGHT_DECAY
        p = jax.tree.map(
            lambda p, m, v: keep * p - rate * m / (jnp.sqrt(v) * spread + 1e-8), p, m, v
        )
        return p, m, v, t, loss

    compiled = jax.jit(update, donate_argnums=(0, 1, 2, 3))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = [parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros((), dtype)]

    def step() -> float:
        data.append(data.pop(0))
        *state[:], loss = compiled(*state, *data[0])
        return float(loss)

    return step


def torch_generation(
    model: TorchModel, K: int, top_k: int, streams: int, *, masked: bool
) -> Callable[[int], list]:
    """Return a sampling loop: last K tokens, top-k filter, softmax, multinomial.

    ``masked``: over all V tokens, the others at −inf, as nanoGPT has it; else over the k alone.
    """

    @torch.inference_mode()
    def generate(tokens: int) -> list:
        contexts = torch.full((streams, K), model.embedding.num_embeddings - 1)
        texts = []
        for _ in range(tokens):
            logits = model(contexts)
            best, ids = torch.topk(logits, top_k)
            if masked:
                logits[logits < best[:, -1:]] = -torch.inf
                drawn = torch.multinomial(torch.softmax(logits, -1), 1)
            else:
                drawn = ids.gather(-1, torch.multinomial(torch.softmax(best, -1), 1))
            contexts = torch.cat((contexts[:, 1:], drawn), 1)
            texts.append(drawn.flatten().tolist())
        return texts

    return generate
