"""The plain page: the same model as the exact one, and each line of it beside its exact one."""

import importlib
import inspect
import re

import numpy as np
import pytest

from minigen import Config, Run
from minigen.proof import plain
from tests.conftest import TINY

TEXT = b"The fox saw the grapes.\n\nThe grapes were high.\n\nThe fox said: they are sour." * 3
SETTINGS = {
    **TINY,
    "training.steps": 20,
    "corpus.documents": "paragraph",
    "corpus.validation_fraction": 0.0,
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup_steps": 0,
    "optimizer.decay": "constant",
    "optimizer.gradient_clip": 0.0,
    "evaluation.every": 0,
    "sampling.every": 0,
}


@pytest.fixture(scope="module")
def exact_and_plain():
    """A run that was trained exactly, its losses, and the same start, batches and losses plain."""
    run = Run(Config.load("fables", SETTINGS), text=TEXT)
    parameters = {name: value.copy() for name, value in run.model.parameters.items()}
    training = run.read_corpus().training
    contexts, targets = training.contexts_and_targets(np.arange(len(training)), 2)
    batches = [run.streams["optimizer"].integers(16, below=len(training)) for _ in range(20)]
    run.streams["optimizer"].position = 0
    rate = run.config.optimizer.learning_rate
    losses = list(plain.train(parameters, contexts, targets, batches, rate))
    return run, [record.loss for record in run.train()], parameters, losses


def test_a_text_becomes_the_same_predictions():
    run = Run(Config.load("fables", SETTINGS), text=[b"ab", b"c\xff"])
    training = run.read_corpus().training
    exact = training.contexts_and_targets(np.arange(len(training)), 2)
    for one, other in zip(exact, plain.predictions([b"ab", b"c\xff"], 2), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_same_batches_give_nearly_the_same_losses_and_weights(exact_and_plain):
    run, exact_losses, parameters, losses = exact_and_plain
    np.testing.assert_allclose(losses, exact_losses, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.1
    for name, value in run.model.parameters.items():
        np.testing.assert_allclose(parameters[name], value, rtol=0, atol=2e-3)


def test_they_write_the_same_text(exact_and_plain):
    run, _, parameters, _ = exact_and_plain
    start = run.streams["inference"].position
    draws = (run.streams["inference"].words(30) >> np.uint64(11)) * 2.0**-53
    run.streams["inference"].position = start
    exact = run.generate("The", max_new_tokens=30, temperature=0.5)
    assert plain.generate(parameters, b"The", 0.5, draws).decode(errors="replace") == exact != ""


def test_every_exact_line_that_it_names_is_there():
    named = re.findall(
        r"(?:text|model|training|decoding)\.\w+\.[\w.]*\w",
        " ".join(re.findall('Exact:([^"]*)', SOURCE)),
    )
    assert len(named) >= 10
    for name in named:
        room, module, *attributes = name.split(".")
        found = importlib.import_module(f"minigen.{room}.{module}")
        for attribute in attributes:
            found = getattr(found, attribute)


def test_it_needs_numpy_alone_and_tells_its_story(capsys):
    imported = re.findall(r"^(?:import|from) (\w+)", SOURCE, re.MULTILINE)
    assert set(imported) == {"collections", "pathlib", "typing", "numpy"}
    plain.main(steps=2)
    out = capsys.readouterr().out
    assert out.startswith("step 1: loss 5.")
    assert "\nOnce" in out


SOURCE = inspect.getsource(plain)
