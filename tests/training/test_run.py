"""The run: what it is given decides what it does, and what it says of itself is so."""

import io
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from minigen import Config, Continuation, MinigenError, Run
from minigen.errors import OptionError
from minigen.model import memory
from minigen.model.model import Model
from minigen.text import corpus
from minigen.training import checkpoint
from minigen.training.logs import NO_LOG, VOUCHED
from minigen.training.run import StepRecord, is_due
from minigen.training.workers import Workers
from tests.conftest import TINY

TEXT = "The fox saw the grapes. The grapes were high.\nThe fox said: they are sour.\n" * 4
CONFIG = Config.load(
    "fables",
    {
        "corpus.documents": "line",
        "training.steps": 3,
        "training.batch_size": 8,
        "tokenizer.vocab_size": 270,
        "model.context_length": 2,
        "model.embedding_dim": 3,
        "optimizer.warmup_steps": 0,
        "evaluation.every": 2,
        "sampling.every": 0,
        "checkpoint.every": 0,
    },
)


def new_run(**changes):
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return Run(CONFIG.override(changes), text=TEXT)


def refused(kind, call):
    """The message of an error."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_what_is_due_every_few_steps_is_due_at_their_multiples_and_never_with_0():
    assert [step for step in range(1, 7) if is_due(step, 2)] == [2, 4, 6]
    assert [step for step in range(1, 4) if is_due(step, 1)] == [1, 2, 3]
    assert not any(is_due(step, 0) for step in range(1, 4))


def test_the_loss_is_measured_when_it_is_due_and_at_the_end_or_never():
    measured = [(r.step, r.fingerprint is not None) for r in new_run().train() if r.validation_loss]
    assert measured == [(2, True), (3, True)]
    never = new_run(evaluation__every=0).train()
    assert [(r.validation_loss, r.sample) for r in never] == 3 * [(None, None)]
    assert [r.fingerprint is not None for r in never] == [False, False, True]


def test_a_batch_is_worked_through_in_as_many_parts_as_were_asked_for(monkeypatch):
    statistics, sizes, prints = Model.statistics, [], set()

    def noted(model, contexts, *rest):
        sizes.append(len(contexts))
        return statistics(model, contexts, *rest)

    monkeypatch.setattr(Model, "statistics", noted)
    for parts, expected in ((1, [8]), (2, [4, 4]), (3, [3, 3, 2]), (9, 8 * [1])):
        run = new_run(training__micro_batches=parts, training__steps=1, evaluation__every=0)
        run.train()
        assert sizes == expected
        sizes.clear()
        prints.add(run.fingerprint)
    assert len(prints) == 1
    new_run(training__micro_batches=2, training__batch_size=1).train(1)
    assert sizes == [1]


def test_a_run_needs_six_times_the_memory_of_its_weights(monkeypatch):
    V, K, D = 270, 2, 3
    needed = 8 * (V * D + D * K * V + V) * 6
    monkeypatch.setattr(memory, "available", lambda: needed)
    new_run()
    monkeypatch.setattr(memory, "available", lambda: needed - 1)
    said = refused(MinigenError, new_run)
    assert said.startswith("training 2,700 weights needs ")
    assert said.endswith("lower model.embedding_dim, model.context_length or tokenizer.vocab_size")


def test_steps_are_from_0_to_those_that_are_left():
    run = new_run()
    for steps in (-1, 4):
        assert refused(OptionError, lambda n=steps: run.steps(n)).startswith(
            f"steps must be from 0 to the 3 left of training.steps = 3 (got {steps})"
        )
    assert list(run.steps(0)) == []
    assert [record.step for record in run.steps(3)] == [1, 2, 3]
    assert list(run.steps(0)) == []
    assert refused(OptionError, lambda: run.steps(-1)).startswith("steps must be from 0 to the 0")
    done = "all 3 steps of training.steps are done; more of them take a new run"
    assert refused(OptionError, lambda: run.steps(1)) == done
    with pytest.warns(UserWarning, match=f"^nothing left to train: {done}$") as caught:
        assert run.train() == []
    assert caught[0].filename == __file__  # the caller's line, which python shows


def test_a_bar_shows_the_steps_that_are_asked_for(capsys):
    run = new_run()
    run.train(1, progress=True)
    assert "1/1" in capsys.readouterr().err
    run.train(progress=True)
    err = capsys.readouterr().err
    assert "2/2" in err
    assert "step/s" in err or "s/step" in err
    assert run.train(0) == []
    assert capsys.readouterr().err == ""


def test_a_text_has_200_tokens_where_nothing_else_is_said():
    run = new_run()
    run.generate("The", suppress_tokens=[256])
    assert run.streams["inference"].position == 200


def test_a_notebook_shows_a_run_as_a_table():
    run = new_run()
    shown = (
        "<table><tr><th>step</th><td>{step} of 3</td></tr><tr><th>loss</th><td>{loss}</td></tr>"
        "<tr><th>weights</th><td>2,700</td></tr>"
        "<tr><th>fingerprint</th><td><code>{fingerprint}</code></td></tr></table>"
    )
    facts = {"step": 0, "loss": "none measured yet", "fingerprint": run.fingerprint}
    assert run._repr_html_() == shown.format(**facts)
    (record,) = run.train(1)
    facts = {"step": 1, "loss": f"{record.loss:.4f} nats per token", "fingerprint": run.fingerprint}
    assert run._repr_html_() == shown.format(**facts)


def test_a_record_a_sample_and_a_checkpoint_are_frozen(tmp_path):
    run = new_run(sampling__every=1)
    (record,) = run.train(1)
    run.save(tmp_path / "x")
    for thing in (record, record.sample, checkpoint.load(tmp_path / "x")):
        with pytest.raises(FrozenInstanceError):
            thing.step = 9


def test_a_sample_says_where_it_was_a_dead_end():
    line = {"step": 1, "prompt": "a", "text": "b", "token_ids": [98]}
    for reason, why, told in (
        ("length", None, {}),
        ("dead_end", "why", {"finish_reason": "dead_end"}),
    ):
        text = Continuation("a", "b", [98], reason, explanation=why)
        assert StepRecord(1, 0.5, 0.1, 9, 3, sample=text).sample_line() == {**line, **told}
    assert StepRecord(1, 0.5, 0.1, 9, 3).sample_line() == {}


def test_a_run_that_shows_how_its_text_is_read_can_be_pickled():
    seen = []
    run = Run(CONFIG, text=TEXT, progress=lambda *progress: seen.append(progress))
    assert seen
    assert pickle.loads(pickle.dumps(run)).train() == run.train()


def test_ids_that_the_text_gave_no_tokens_are_refused_before_the_first_step():
    config = CONFIG.override({"tokenizer.vocab_size": 1024, "sampling.suppress_tokens": [1000]})
    with pytest.raises(MinigenError, match="takes ids below "):
        Run(config, text="to be or not")


def test_a_text_that_is_not_in_the_run_must_be_given_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("ab\ncd\n")
    run = new_run()
    run.save("x")
    loaded = Run.load("x")
    assert refused(MinigenError, loaded.read_corpus).startswith("this run was trained on a text ")
    assert refused(MinigenError, lambda: Run.load("x", text=[TEXT])) == (
        "the text of this run was cut into documents by corpus.documents = 'line', not given as a "
        "list of them: give it as one text"
    )
    other = refused(MinigenError, lambda: Run.load("x", text="other"))
    assert other.startswith("the text is not the one this run was trained on: its SHA-256 is ")
    assert Run.load("x", text=TEXT).train() == run.train()

    both = refused(OptionError, lambda: loaded.read("text", ["lines.txt"]))
    assert both == "give a text or paths, not both"
    documents = [256, 97, 98, 256, 99, 100, 256]  # of lines, as the run's own
    assert loaded.read("ab\ncd").array.tolist() == documents
    assert loaded.read(paths=["lines.txt"]).array.tolist() == documents
    assert run.read().array.tolist() == run.corpus.validation.array.tolist()
    whole = new_run(corpus__validation_fraction=0.0)
    assert refused(MinigenError, whole.read).startswith(
        "this run holds no text back for validation"
    )
    assert whole.evaluate() is None


def test_a_list_holds_documents_and_the_config_says_so(tmp_path):
    config = CONFIG.override({"tokenizer.vocab_size": 257, "corpus.validation_fraction": 0.0})
    run = Run(config, text=["ab\ncd", "ef"])
    assert run.config.corpus.documents == "file"
    assert run.config.corpus.text == "external"
    assert run.corpus.training.array.tolist() == [256, 97, 98, 10, 99, 100, 256, 101, 102, 256]
    run.save(tmp_path / "x")
    assert Run.load(tmp_path / "x", text=["ab\ncd", "ef"]).train() == run.train()


def test_standard_input_is_read_by_one_process_alone(monkeypatch):
    config = CONFIG.override({"corpus.text": ["-"]})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert Run(config).train() == new_run().train()
    two = Workers()
    two.size = 2
    said = refused(OptionError, lambda: Run(config, workers=two))
    assert said.startswith("standard input reaches the first worker alone: name files that all ")


def test_a_checkpoint_says_of_how_many_files_a_text_of_ones_own_was_and_what_stands_in_the_logs(
    tmp_path,
):
    logs = dict.fromkeys(VOUCHED, NO_LOG)
    for run, files in ((Run(Config.load("fables", TINY)), None), (new_run(), 1)):
        run.save(tmp_path / "x", logs=logs)
        saved = checkpoint.load(tmp_path / "x")
        assert (saved.corpus_files, saved.logs) == (files, logs)


def test_a_run_that_was_loaded_reads_its_text_once(tmp_path, monkeypatch):
    Run(CONFIG.override({"corpus.text": "fables"})).save(tmp_path / "x")
    read, load = [], corpus.load
    monkeypatch.setattr(corpus, "load", lambda *args, **more: read.append(1) or load(*args, **more))
    run = Run.load(tmp_path / "x")
    assert read == []
    run.train(2)
    assert read == [1]


def test_of_several_workers_an_error_that_all_have_breaks_no_run(monkeypatch):
    run = new_run()
    run.workers.size = 2
    advance = Run._advance

    def fails(_run):
        raise MinigenError("all workers say so")

    monkeypatch.setattr(Run, "_advance", fails)
    refused(MinigenError, run.train)
    monkeypatch.setattr(Run, "_advance", advance)
    run.workers.size = 1
    assert len(run.train()) == 3


def test_a_line_of_metrics_holds_what_was_measured_under_its_names():
    first, *_, last = Run(CONFIG.override({"evaluation.every": 2}), text=TEXT).train()
    always = ["step", "loss", "loss_bits", "learning_rate"]
    always += ["optimizer_position", "inference_position"]
    assert list(first.metrics()) == always
    assert list(last.metrics()) == [*always, "validation_loss", "fingerprint"]
    assert last.metrics()["loss_bits"] == last.loss.hex()
