"""A run is whole: interrupted at any statement, copied, pickled, or asked by several threads."""

import pickle
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from pathlib import Path

import numpy as np
import pytest

import minigen
from minigen import Config, MinigenError, Run
from minigen.decoding.generation import Task, complete, generate
from minigen.decoding.policy import Policy
from minigen.exact.streams import Stream
from minigen.model import engines, kernels, kernels_numba, parallel
from minigen.model import model as model_module
from minigen.model.head import project
from minigen.model.model import Model
from minigen.text import corpus
from minigen.text.tokenizer import ByteTokenizer
from minigen.training.workers import Workers

TEXT = "The fox saw the grapes. The grapes were high.\nThe fox said: they are sour.\n" * 4
STEPS = 5
CONFIG = Config.load(
    "fables",
    {
        "corpus.documents": "line",
        "training.steps": STEPS,
        "training.batch_size": 8,
        "training.micro_batches": 2,
        "tokenizer.vocab_size": 270,
        "model.context_length": 2,
        "model.embedding_dim": 3,
        "optimizer.warmup_steps": 2,
        "evaluation.every": 1,
        "sampling.every": 1,
        "sampling.max_new_tokens": 3,
    },
)
PACKAGE = str(Path(minigen.__file__).parent)


def new_run(changes=None):
    return Run(CONFIG.override(changes or {}), text=TEXT)


def state(run):
    """All that a step changes."""
    moments = [moment.tobytes() for moment in run.optimizer.moments.values()]
    positions = {name: stream.position for name, stream in run.streams.items()}
    return run.step, run.model.flat.tobytes(), moments, positions


class Interruption:
    """Traces a call; raises at the n-th statement of the package, and notes all before it."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        self.at, self.error, self.met = at, error, []

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.met.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.met) - 1 == self.at:
                raise self.error
        return self

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [
        (kernels, "adamw"),
        (kernels_numba, "sgd"),
        pytest.param(kernels, "sgd", marks=pytest.mark.slow),
        pytest.param(kernels_numba, "adamw", marks=pytest.mark.slow),
    ],
    ids=["numpy, adamw", "numba, sgd", "numpy, sgd", "numba, adamw"],
)
def test_a_step_interrupted_at_any_statement_has_happened_or_not(engine, optimizer, monkeypatch):
    """Field report 81; each statement once, those of the run the last time that they are met."""
    monkeypatch.setattr(engines, "chosen", lambda: engine)
    monkeypatch.setattr(parallel, "GRAIN", 1)  # helpers go on when the step is interrupted
    start = new_run({"optimizer.name": optimizer})
    start.train(1)
    whole = deepcopy(start)
    with Interruption() as seen:
        whole.train(1)
    before, after = state(start), state(whole)
    whole.train(1)
    first = {place: n for n, place in reversed(list(enumerate(seen.met)))}
    last = {place: n for n, place in enumerate(seen.met) if place[0].endswith("run.py")}
    moments = sorted({*first.values(), *last.values()})
    assert len(first) > 200  # of our statements

    ended = Counter()
    for moment in moments:
        run = deepcopy(start)
        error = (KeyboardInterrupt, MemoryError)[moment % 2]
        with pytest.raises(error), Interruption(moment, error):
            run.train(1)
        left = state(run)
        ended["before" if left == before else "after"] += 1
        assert left in (before, after), seen.met[moment]
        run.train(1)
        assert state(run) == (after if left == before else state(whole)), seen.met[moment]
    assert ended["before"] > 200
    assert ended["after"] > 0


def test_a_step_that_diverges_leaves_the_run_as_it_was():
    run = new_run({"optimizer.learning_rate": 1e300, "optimizer.warmup_steps": 0})
    before = state(run)
    with pytest.raises(MinigenError, match="diverged at step 1"):
        run.train(1)
    assert state(run) == before


def test_a_text_that_was_interrupted_took_no_words():
    run = new_run()
    run.generate("The")
    before, whole = state(run), deepcopy(run)
    with Interruption() as seen:
        text = whole.generate("The", max_new_tokens=9)
    last = len(seen.met) - 3  # in the two behind it the text is written, and on its way back
    for moment in {*range(0, last, 11), last}:
        asked = deepcopy(run)
        with pytest.raises(KeyboardInterrupt), Interruption(moment):
            asked.generate("The", max_new_tokens=9)
        assert state(asked) == before
        assert asked.generate("The", max_new_tokens=9) == text


def test_an_interrupted_run_of_several_workers_says_that_it_is_broken(monkeypatch, tmp_path):
    run = new_run()
    run.workers = Workers()
    run.workers.size = 2
    monkeypatch.setattr(run, "_draw_statistics", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.train(1)
    for use in (run.train, lambda: run.save(tmp_path / "x")):
        with pytest.raises(MinigenError, match="this run is broken: its step 1 was interrupted"):
            use()
    with pytest.raises(MinigenError, match="several workers cannot be copied"):
        deepcopy(run)


def test_what_no_steps_lead_to_is_neither_saved_nor_loaded(tmp_path):
    run = new_run()
    run.train(2)
    run.streams["optimizer"].word()
    broken = r"after 2 steps of 8 predictions the stream optimizer must be at word 16 \(got 17\)"
    with pytest.raises(MinigenError, match=broken):
        run.save(tmp_path / "x")
    run.streams["optimizer"].position = 16
    run.save(tmp_path / "x")
    saved = minigen.training.checkpoint.load(tmp_path / "x")
    saved.streams["optimizer"] = 17
    minigen.training.checkpoint.save(tmp_path / "x", saved)
    with pytest.raises(MinigenError, match=f"x cannot be right: .*{broken}"):
        Run.load(tmp_path / "x")


@pytest.mark.parametrize("weight", [np.nan, np.inf, 2.0**401])
def test_weights_that_no_step_could_take_up_are_not_saved(weight, tmp_path):
    run = new_run()
    run.train(1)
    run.model.flat[7] = weight
    run.model.changed()
    with pytest.raises(MinigenError, match="finite"):
        run.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "copied",
    [deepcopy, lambda run: pickle.loads(pickle.dumps(run)), copy],
    ids=["deepcopy", "pickle", "copy"],
)
def test_a_copy_of_a_run_is_a_run_and_neither_changes_the_other(copied, tmp_path):
    """Field report 82."""
    run = new_run()
    run.train(2)
    run.generate("The")
    twin, before = copied(run), state(run)
    records, text = twin.train(), twin.generate("The")
    assert twin.step == STEPS
    assert state(run) == before
    assert twin.model.parameters["W"].base is twin.model.flat
    assert (run.train(), run.generate("The")) == (records, text)
    assert state(run) == state(twin)
    run.save(tmp_path / "a")
    twin.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_copy_of_a_run_whose_tokens_are_in_a_file_is_a_run(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    options = {"documents": "line", "validation_fraction": 0.1, "vocab_size": 270}
    text = corpus.load([tmp_path / "text"], cache=tmp_path / "cache", **options)
    run = Run(CONFIG.override({"corpus.text": [str(tmp_path / "text")]}))
    run.corpus = text
    for twin in (deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert twin.corpus.training.array.tolist() == text.training.array.tolist()
        assert twin.train() == new_run().train()


def test_a_copied_model_has_views_of_its_own_weights():
    model = new_run().model
    twin = deepcopy(model)
    twin.parameters["b"][0] = 7.0
    twin.changed()
    assert (twin.flat[-model.vocab_size], model.parameters["b"][0]) == (7.0, 0.0)


# ── Threads ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hasty():
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def texts_of(model, tokenizer, seed):
    pieces = generate(
        Task(model, tokenizer, Policy(min_new_tokens=12), max_new_tokens=12),
        ["The fox", "grapes", ""],
        lambda row: Stream(seed, f"inference/{row}"),
    )
    return [text.token_ids for text in complete(pieces)]


@pytest.mark.parametrize("room", [1 << 23, 0], ids=["whole table", "rows come and go"])
def test_threads_that_share_a_model_get_what_each_would_get_alone(hasty, room, monkeypatch):
    """Field report 87."""
    monkeypatch.setattr(model_module, "_ROOM", room)
    run = new_run()
    run.train()
    alone = [texts_of(run.model, run.tokenizer, seed) for seed in range(32)]
    for _ in range(3):
        fresh = deepcopy(run.model)
        tokenizer = ByteTokenizer(run.tokenizer.merges)
        with ThreadPoolExecutor(8) as threads:
            together = threads.map(lambda s, m=fresh, t=tokenizer: texts_of(m, t, s), range(32))
            assert list(together) == alone


def test_a_run_asked_in_another_thread_while_it_trains_answers_as_at_some_step(hasty):
    steps = 25
    changes = {"training.steps": steps, "sampling.every": 0, "evaluation.every": 0}
    alone, expected, positions = new_run(changes), [], []
    for step in range(steps + 1):
        if step:
            alone.train(1)
        expected.append(alone.model)
    run, asked = new_run(changes), []

    def ask():
        while run.step < steps:
            before = run.streams["inference"].position
            text = run.generate("The", max_new_tokens=6, min_new_tokens=6)
            asked.append((before, text))
            positions.append(run.streams["inference"].position)

    thread = threading.Thread(target=ask)
    thread.start()
    run.train()
    thread.join()
    assert state(run)[:3] == state(alone)[:3]
    assert positions == [6 * n for n in range(1, len(asked) + 1)]
    for before, text in asked:
        probe = copy(alone)
        possible = set()
        for model in expected:
            probe.model = model
            probe.streams = {"inference": Stream(CONFIG.run.seed, "inference", before)}
            possible.add(probe.generate("The", max_new_tokens=6, min_new_tokens=6))
        assert text in possible


def test_runs_that_train_in_threads_of_one_process_end_as_each_alone(hasty, monkeypatch):
    monkeypatch.setattr(parallel, "GRAIN", 1)
    changes = [{"run.seed": seed, "training.steps": 20} for seed in range(4)]
    alone = [new_run(change) for change in changes]
    together = deepcopy(alone)
    for run in alone:
        run.train()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(Run.train, together))
    assert list(map(state, together)) == list(map(state, alone))


def test_threads_that_ask_one_run_get_its_texts_each_once(hasty):
    run = new_run()
    alone = [run.generate("The", max_new_tokens=6, min_new_tokens=6) for _ in range(40)]
    run.streams["inference"].position = 0
    with ThreadPoolExecutor(4) as threads:
        jobs = [
            threads.submit(run.generate, "The", max_new_tokens=6, min_new_tokens=6)
            for _ in range(40)
        ]
    assert sorted(job.result() for job in jobs) == sorted(alone)


def test_threads_that_train_one_run_take_each_step_once(hasty):
    changes = {"training.steps": 60, "sampling.every": 0, "evaluation.every": 0}
    alone, run, start = new_run(changes), new_run(changes), threading.Barrier(3)
    expected = [record.metrics() for record in alone.train()]

    def train(steps):
        start.wait()
        return run.train(steps)

    with ThreadPoolExecutor(3) as threads:
        taken = [record.metrics() for some in threads.map(train, [20] * 3) for record in some]
    assert sorted(taken, key=lambda line: line["step"]) == expected
    assert run.fingerprint == alone.fingerprint


# ── The table's rows that are kept ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [0, 1, 2, 5, 300])
def test_logits_have_the_same_bits_however_few_rows_are_kept(most):
    """Field report 103."""
    model = Model(257, 3, 4)
    model.initialize(Stream(0, "init"))
    model._most_kept = most
    W, b = model.parameters["W"], model.parameters["b"]
    stream = Stream(1, "contexts")
    for size in (1, 7, 1, 40, 3, 1):
        contexts = stream.integers(3 * size, 257).reshape(size, 3)
        logits = model.logits(contexts)
        assert np.array_equal(logits, project(model.hidden(contexts), W, b))
        assert len(model._kept[0]) <= 3 * most
