"""How far the gradient's grids lead from plain float64: `python -m benchmarks.precision`.

The default config is trained beside its control, the same model in plain floats; then once more
with a batch so small that it leaves the grids more bits. After some steps the gradients of the next
batch are compared, too, both at the weights of the exact run.
"""

import copy
from collections.abc import Iterator

import numpy as np

from benchmarks.defaults import QUIET
from minigen import Config, Run
from minigen.model.head import gradient_bits
from minigen.proof.floats import with_floats

STEPS = 600
COMPARED = (0, 30, 100, STEPS)  # steps at which gradients are
SMALL_BATCH = 512


def columns(run: Run) -> Iterator[str]:
    """Say for each parameter how far its gradient is off, and how many signs are other ones."""
    control = with_floats(copy.copy(run))
    config, training = run.config, run.read_corpus().training
    N = config.training.batch_size
    indices = copy.copy(run.streams["optimizer"]).integers(N, below=len(training))
    batch = training.contexts_and_targets(indices, config.model.context_length)
    exact = run.model.views(run.model.gradient(run.model.statistics(*batch, N)))
    right = run.model.views(control.gradient(control.statistics(*batch, N)))
    for name, wanted in right.items():
        found = exact[name].reshape(-1, exact[name].shape[-1])
        wanted = wanted.reshape(found.shape)
        typical = np.sqrt(np.mean(wanted**2, axis=0 if name != "b" else None))  # of its column
        off = np.abs(found - wanted) / typical
        other = np.sign(found) * np.sign(wanted) < 0
        largest = np.max((np.abs(wanted) / typical)[other], initial=0.0)
        yield (
            f"  {name}: off by {np.max(off):.1e} of its column at most, "
            f"{np.mean(np.any(off > 1e-3, axis=0)):.1%} of columns by more than a thousandth; "
            f"{np.sum(other)} of {other.size:,} other signs, of entries up to {largest:.1e}"
        )


def compare(config: Config) -> None:
    exact, plain = Run(config), Run(config)
    with_floats(plain)
    d, weights = gradient_bits(config.training.batch_size, config.model.context_length)
    print(f"batch_size {config.training.batch_size}: {d} bits of p - 1[y], {weights} of a weight")
    losses = []
    for step in range(STEPS + 1):
        if step in COMPARED:
            print(f"step {step}:", *columns(exact), sep="\n")
        if step < STEPS:
            (one,), (other,) = exact.train(1), plain.train(1)
            losses.append(abs(one.loss - other.loss))
    validation = [run.evaluate() or 0.0 for run in (exact, plain)]
    print(
        f"after {STEPS} steps: loss within {max(losses):.1e} nats, validation loss within "
        f"{abs(validation[0] - validation[1]):.1e}, weights within "
        f"{np.max(np.abs(exact.model.flat - plain.model.flat)):.1e}"
    )


def main() -> None:
    default = Config.load("fables", overrides=QUIET)
    compare(default)
    compare(default.override({"training.batch_size": SMALL_BATCH}))


if __name__ == "__main__":
    main()
