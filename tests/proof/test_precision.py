"""How near exact arithmetic stays to plain float64, on the default config: told in the docs."""

import numpy as np
import pytest

from minigen import Config, Run
from minigen.proof.floats import FloatModel, with_floats

STEPS = 40


@pytest.fixture(scope="module")
def runs():
    """The default config, trained some steps exactly and by the control, with the losses."""
    config = Config.load("fables", {"evaluation.every": 0, "sampling.every": 0})
    exact, plain = Run(config), Run(config)
    with_floats(plain)
    losses = [[record.loss for record in run.train(STEPS)] for run in (exact, plain)]
    return exact, plain, np.array(losses)


def test_the_losses_stay_within_two_millionths_of_a_nat_of_plain_float64(runs):
    exact, plain, (ours, theirs) = runs
    assert np.abs(ours - theirs).max() < 2e-6
    assert abs(exact.evaluate() - plain.evaluate()) < 1e-6


def test_no_entry_of_the_gradient_is_off_by_a_thousandth_of_its_columns_typical_size(runs):
    exact = runs[0]
    model, training = exact.model, exact.read_corpus().training
    N = exact.config.training.batch_size
    indices = exact.streams["optimizer"].integers(N, below=len(training))
    batch = training.contexts_and_targets(indices, model.context_length)
    plain = FloatModel(model.vocab_size, model.context_length, model.embedding_dim)
    plain.load(model.parameters)
    ours, theirs = (m.views(m.gradient(m.statistics(*batch, N))) for m in (model, plain))
    for name, expected in theirs.items():
        axes = tuple(range(expected.ndim - 1)) or None
        typical = np.sqrt((expected * expected).mean(axis=axes))
        assert (np.abs(ours[name] - expected) <= 1e-3 * typical).all(), name
        counts = np.abs(expected) > 1e-3 * typical
        assert (np.sign(ours[name]) == np.sign(expected))[counts].all(), name
