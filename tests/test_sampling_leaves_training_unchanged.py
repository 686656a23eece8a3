"""Asking a run for text, whenever, however and how often, leaves its training as it was.

This is what minigen is for. A program that draws its batches and its texts from one stream of
random numbers trains differently for having been looked at: each token that is sampled moves the
stream on, so the next batch is another one, and so are all weights after it. Here training draws
from the stream ``optimizer`` and text from the stream ``inference``. The test trains the same run
twice, once in silence and once with text asked for on the way, and compares every bit. The last
tests make the old mistake on purpose, to show that the comparison would see it.
"""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from minigen import Config, Policy, Run, Stream
from minigen.decoding.beams import beam_search
from minigen.decoding.generation import Task, complete, generate
from minigen.decoding.speculation import speculate

STEPS = 12
CONFIG = Config.load(
    "fables",
    {
        "training.steps": STEPS,
        "training.batch_size": 16,
        "tokenizer.vocab_size": 257,
        "model.context_length": 3,
        "model.embedding_dim": 4,
        "optimizer.warmup_steps": 3,
        "evaluation.every": 0,
        "sampling.every": 0,
    },
)
TEXT = "The fox saw the grapes. The grapes were high. The fox said: they are sour.\n" * 4


class WatchedStream(Stream):
    """A stream that keeps the batches drawn from it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.batches = []

    def integers(self, n, below):
        batch = super().integers(n, below)
        self.batches.append(batch.tolist())
        return batch


def new_run():
    run = Run(CONFIG, text=TEXT)
    run.streams["optimizer"] = WatchedStream(CONFIG.run.seed, "optimizer")
    return run


def train(run, ask=lambda run: None, at=range(STEPS + 1)):
    """Train, asking for text after the steps ``at`` (0: before the first); return all there is."""
    losses, weights, moments = [], [], []
    for step in range(STEPS + 1):
        if step:
            losses += [record.loss.hex() for record in run.train(1)]
            weights.append(run.fingerprint)
            moments.append([moment.tobytes() for moment in run.optimizer.moments.values()])
        if step in at:
            ask(run)
    return {
        "batches": run.streams["optimizer"].batches,
        "losses": losses,
        "weights": weights,
        "moments": moments,
    }


def greedy(run):
    run.generate("The fox", max_new_tokens=5, temperature=0)


def sampling(run):
    run.generate("The fox", max_new_tokens=5)


def filters_and_penalties(run):
    run.generate("The", max_new_tokens=5, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01)
    run.generate("", max_new_tokens=5, repetition_penalty=1.3, no_repeat_ngram_size=2)


def beams(run):
    beam_search(Task(run.model, run.tokenizer, max_new_tokens=5), "The fox", num_beams=3)


def speculation(run):
    draft = new_run()
    pair = run.streams["inference"], Stream(0, "inference/accept")
    task = Task(run.model, run.tokenizer, max_new_tokens=5)
    complete(speculate(task, draft.model, draft.tokenizer, ["The fox"], lambda _: pair))


def many_texts(run):
    for seed in range(5):
        run.generate(f"Text {seed}", max_new_tokens=2 + seed)


def evaluation(run):
    run.evaluate()


@pytest.fixture(scope="module")
def in_silence():
    """What training is when nobody asks for anything."""
    return train(new_run())


@pytest.mark.parametrize(
    "ask",
    [greedy, sampling, filters_and_penalties, beams, speculation, many_texts, evaluation],
    ids=lambda ask: ask.__name__,
)
def test_text_asked_for_after_every_step_leaves_batches_losses_weights_and_moments(in_silence, ask):
    assert train(new_run(), ask) == in_silence


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_text_asked_for_once_after_any_step_leaves_them_too(in_silence, step):
    assert train(new_run(), sampling, at=[step]) == in_silence


@pytest.mark.parametrize("every", [1, 5])
def test_samples_that_the_config_asks_for_leave_them_too(in_silence, every):
    """Field report 2."""
    run = new_run()
    run.config = CONFIG.override({"sampling.every": every, "sampling.max_new_tokens": 5})
    assert train(run) == in_silence


@pytest.mark.parametrize("every", [1, 7])
def test_evaluation_that_the_config_asks_for_leaves_them_too(in_silence, every):
    """Field report 1."""
    run = new_run()
    run.config = CONFIG.override({"evaluation.every": every})
    assert train(run) == in_silence


def test_numpys_global_generator_is_neither_read_nor_moved():
    """Field report 3; in a process of its own, so that the import counts too."""
    code = """
        import numpy as np
        np.random.seed(1)
        import minigen
        overrides = {"training.steps": 2, "tokenizer.vocab_size": 257}
        run = minigen.Run(minigen.Config.load(overrides=overrides), text="ab" * 99)
        run.train()
        run.generate("a", max_new_tokens=5)
        print(np.random.random(), run.fingerprint)
        np.random.seed(2)
        again = minigen.Run(run.config, text="ab" * 99)
        again.train()
        assert again.fingerprint == run.fingerprint
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    np.random.seed(1)
    assert float(done.stdout.split()[0]) == np.random.random()


def test_text_that_is_never_read_to_its_end_leaves_them_too(in_silence):
    def interrupted(run):
        task = Task(run.model, run.tokenizer, Policy(), max_new_tokens=9)
        pieces = generate(task, ["The"], lambda _: run.streams["inference"])
        next(pieces)

    assert train(new_run(), interrupted) == in_silence


# ── The mistake, made on purpose ─────────────────────────────────────────────────────────────────


def shared_stream_run():
    """A run whose texts and batches come from one stream."""
    run = new_run()
    run.streams["inference"] = run.streams["optimizer"]
    return run


def test_a_shared_stream_trains_the_same_as_long_as_nobody_looks(in_silence):
    """So that what the next tests see is the sampling, and nothing else."""
    assert train(shared_stream_run()) == in_silence
    assert train(shared_stream_run(), greedy) == in_silence  # greedy text draws no word


@pytest.mark.parametrize("step", [0, 1, STEPS - 1])
def test_the_comparison_catches_a_shared_stream_from_the_next_batch_on(in_silence, step):
    seen = train(shared_stream_run(), sampling, at=[step])
    for what in ("batches", "losses", "weights", "moments"):
        assert seen[what][:step] == in_silence[what][:step]
        assert seen[what][step] != in_silence[what][step], what


def test_a_single_sampled_token_is_enough_to_be_caught(in_silence):
    one_token = train(
        shared_stream_run(), lambda run: run.generate("The", max_new_tokens=1), at=[4]
    )
    assert one_token["batches"] != in_silence["batches"]
    assert one_token["weights"][-1] != in_silence["weights"][-1]


def test_the_comparison_catches_an_evaluation_that_draws_its_batch_from_the_shared_stream(
    in_silence,
):
    looked = train(new_run(), lambda run: run.streams["optimizer"].words(1), at=[4])
    assert looked["batches"] != in_silence["batches"]
    assert looked["weights"][-1] != in_silence["weights"][-1]
