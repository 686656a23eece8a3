"""The experiments of `minigen prove`: true claims hold, broken ones fail, controls are caught."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from minigen import Config, Run
from minigen.cli import run as command
from minigen.decoding import generation, policy
from minigen.errors import MinigenError
from minigen.exact.streams import Stream
from minigen.model.model import Model, Statistics
from minigen.proof import environments, experiments, proving, wholeness, workers
from minigen.proof.environments import Environment, Outcome, judge, train_in
from minigen.proof.laboratory import Claim, Control, Laboratory
from minigen.proof.proving import EXPERIMENTS, proven

TEXT = "The fox saw the grapes. The grapes were high. The fox said: they are sour.\n" * 4
SMALL = {
    "training.steps": 5,
    "training.batch_size": 8,
    "corpus.documents": "line",
    "tokenizer.vocab_size": 260,
    "model.context_length": 3,
    "model.embedding_dim": 2,
    "optimizer.warmup_steps": 2,
}
BYTES = {"tokenizer.vocab_size": 257}
IN_PROCESS = [one for one in EXPERIMENTS if one not in (environments.environment, workers.workers)]


@pytest.fixture
def laboratory(tmp_path):
    """Make a laboratory for a text and a change of the config."""

    def make(changes=None, text=TEXT):
        path = tmp_path / "text.txt"
        path.write_text(text)
        config = Config.load("fables", {**SMALL, "corpus.text": [str(path)], **(changes or {})})
        return Laboratory(config)

    return make


# ── Claims that are true ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, TEXT),
        ({"training.steps": 0}, TEXT),
        ({"training.steps": 1}, TEXT),
        ({"training.steps": 100, "optimizer.warmup_steps": 40}, TEXT),
        (BYTES, "a"),
        ({**BYTES, "training.batch_size": 1, "training.steps": 1}, "a"),
        ({"corpus.validation_fraction": 0.0}, TEXT),
        ({"corpus.validation_fraction": 0.9}, TEXT),
        ({"model.context_length": 1}, TEXT),
        ({"model.embedding_dim": 1, "model.context_length": 2}, TEXT),
        ({"training.batch_size": 1}, TEXT),
        ({"training.batch_size": 33, "training.micro_batches": 50}, TEXT),
        ({"optimizer.name": "sgd", "optimizer.decay": "constant"}, TEXT),
        ({"optimizer.weight_decay": 0.0, "optimizer.gradient_clip": 0.0}, TEXT),
        ({"optimizer.learning_rate": 1e-300}, TEXT),
        ({"evaluation.every": 1, "sampling.every": 1, "checkpoint.every": 1}, TEXT),
        ({"sampling.max_new_tokens": 1, "sampling.prompt": ""}, TEXT),
        ({"sampling.temperature": 0.0}, TEXT),
        ({"sampling.top_k": 3, "sampling.no_repeat_ngram_size": 2}, TEXT),
        ({"run.seed": 9}, TEXT),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_claim_holds_and_every_control_is_caught_on_any_config(laboratory, changes, text):
    lab = laboratory(changes, text)
    for experiment in IN_PROCESS:
        claim = experiment(lab)
        assert (claim.holds, claim.control.caught) == (True, True), claim


def test_a_sum_of_one_product_has_one_order_so_its_claim_is_not_tested(laboratory):
    claim = experiments.incremental(
        laboratory({"model.context_length": 1, "model.embedding_dim": 1})
    )
    assert claim.holds is None
    assert claim.evidence.startswith("not tested here")


@pytest.mark.parametrize(
    ("steps", "warm_up", "expected"),
    [(1500, 50, (40, 2)), (40, 7, (40, 7)), (20, 3, (20, 3)), (1, 1, (4, 1)), (0, 0, (4, 0))],
)
def test_steps_are_cut_to_forty_and_the_warm_up_in_proportion(laboratory, steps, warm_up, expected):
    lab = laboratory({"training.steps": steps, "optimizer.warmup_steps": warm_up})
    assert (lab.steps, lab.config.optimizer.warmup_steps) == expected


def test_a_text_that_can_be_read_only_once_is_kept(laboratory, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[TEXT])
    writer.start()
    lab = laboratory({"corpus.text": [str(pipe)]})
    writer.join()
    assert Path(lab.config.corpus.text[0]).read_text() == TEXT
    assert lab.corpus.sha256 == Run(lab.config).corpus_sha256


def test_what_a_laboratory_keeps_goes_with_it(laboratory):
    lab = laboratory()
    folder = lab.folder
    assert lab.start.parent == folder
    del lab
    assert not folder.exists()


def test_a_config_that_does_not_train_is_an_error(laboratory):
    with pytest.raises(MinigenError, match="training diverged"):
        experiments.sampling(laboratory({"optimizer.learning_rate": 1e300}))


# ── Claims that were broken on purpose ───────────────────────────────────────────────────────────


def failed(claim, *words):
    assert claim.holds is False, claim
    for word in words:
        assert word in claim.evidence
    return True


def test_text_drawn_from_the_optimizers_stream_fails_the_claim_on_sampling(laboratory, monkeypatch):
    generator = Run.generator.fget

    def careless(run):
        run.streams["optimizer"].word()
        return generator(run)

    monkeypatch.setattr(Run, "generator", property(careless))
    claim = experiments.sampling(laboratory())
    assert failed(claim, "greedy: other positions, batches, losses", "the config's policy: other")
    assert "beams" not in claim.evidence


def test_an_evaluation_that_touches_the_weights_fails_the_claim_on_evaluation(
    laboratory, monkeypatch
):
    def careless(run):
        run.model.parameters["b"][0] += 2.0**-50
        run.model.changed()

    monkeypatch.setattr(Run, "evaluate", careless)
    assert failed(experiments.evaluation(laboratory()), "every 1: other weights from step 1 on")


@pytest.mark.parametrize("stream", ["optimizer", "inference"])
def test_a_position_lost_on_loading_fails_the_claim_on_resume(laboratory, monkeypatch, stream):
    load = Run.load.__func__

    def careless(kind, *arguments, **options):
        run = load(kind, *arguments, **options)
        run.streams[stream].position = 0
        return run

    monkeypatch.setattr(Run, "load", classmethod(careless))
    assert failed(experiments.resume(laboratory()), "stopped at 2: other", "stopped at 1, 2, 4")


def test_moments_lost_on_loading_fail_the_claim_on_resume(laboratory, monkeypatch):
    load = Run.load.__func__

    def careless(kind, *arguments, **options):
        run = load(kind, *arguments, **options)
        for moment in run.optimizer.moments.values():
            moment[:] = 0.0
        return run

    monkeypatch.setattr(Run, "load", classmethod(careless))
    assert failed(experiments.resume(laboratory()), "weights from step 3 on")


def test_text_that_moves_a_weight_fails_the_claim_on_decoding(laboratory, monkeypatch):
    logits = Model.logits

    def careless(model, contexts):
        model.parameters["E"][0, 0] += 2.0**-50
        return logits(model, contexts)

    monkeypatch.setattr(Model, "logits", careless)
    assert failed(experiments.decoding(laboratory()), "greedy: other weights or moments", "beams")


def test_words_shared_by_the_rows_of_a_batch_fail_the_claim_on_replay(laboratory, monkeypatch):
    draw = policy.draw

    def seeded(seed, name):
        streams[name] = streams.get(name, 0) + 1
        return Stream(seed, f"{name}/{streams[name]}")

    streams = {}
    monkeypatch.setattr(policy, "draw", lambda w, words: draw(w, words[::-1]))
    monkeypatch.setattr(experiments, "Stream", seeded)
    assert failed(experiments.replay(laboratory()), "the other way round: another text")


def test_a_seed_without_effect_fails_the_claim_on_replay(laboratory, monkeypatch):
    monkeypatch.setattr(experiments, "Stream", lambda seed, name: Stream(0, name))
    assert failed(experiments.replay(laboratory()), "another seed: the same text")


def test_logits_off_by_one_bit_fail_the_claim_on_contexts(laboratory, monkeypatch):
    logits = Model.logits
    monkeypatch.setattr(
        Model, "logits", lambda model, contexts: np.nextafter(logits(model, contexts), 9.0)
    )
    assert failed(experiments.incremental(laboratory()), "alone: other logits", "one pass")


def test_a_part_counted_by_its_own_size_fails_the_claim_on_micro_batches(laboratory, monkeypatch):
    statistics = Model.statistics

    def careless(model, contexts, targets, step_size, out=None):
        factor = 3 if len(targets) < 8 else 1
        return statistics(model, contexts, targets, step_size * factor, out)

    lab = laboratory()
    monkeypatch.setattr(Model, "statistics", careless)
    assert failed(experiments.micro_batches(lab), "2 parts: other", "8 parts: other")


def test_parts_that_depend_on_their_order_fail_the_claim_on_micro_batches(laboratory, monkeypatch):
    plus = Statistics.__add__

    def careless(one, other):
        both = plus(one, other)
        both.vector[...] += np.rint(one.vector * 2.0**-9)
        return both

    monkeypatch.setattr(Statistics, "__add__", careless)
    assert failed(experiments.micro_batches(laboratory()), "order: other gradient")


def test_a_step_taken_in_place_fails_the_claim_on_interruptions(laboratory, monkeypatch):
    lab = laboratory()
    monkeypatch.setattr(Run, "_take_step", Run._advance)
    assert failed(wholeness.interrupt(lab), "interrupted before statement")


def test_where_no_step_was_interrupted_nothing_was_tested(laboratory, monkeypatch):
    lab = laboratory()
    monkeypatch.setattr(wholeness, "_take_step", lambda run, moment=None: len(run.train(1)))
    assert wholeness.interrupt(lab).holds is None


def test_a_copy_that_lost_its_moments_fails_the_claim_on_copies(laboratory, monkeypatch):
    whole = Run.__getstate__

    def without_moments(run):
        left = whole(run)
        optimizer = copy.copy(left["optimizer"])
        optimizer.moments = {name: np.zeros_like(m) for name, m in optimizer.moments.items()}
        return {**left, "optimizer": optimizer}

    lab = laboratory()
    monkeypatch.setattr(Run, "__getstate__", without_moments)
    assert failed(wholeness.copies(lab), *(f"{name}: other weights" for name in wholeness.COPIES))


def test_a_copy_that_shares_its_weights_fails_the_claim_on_copies(laboratory, monkeypatch):
    """It moves a weight of the original while it trains."""
    advance = Run._advance

    def careless(run):
        run.model.flat[0] += 1.0
        return advance(run)

    lab = laboratory()
    monkeypatch.setattr(Run, "_advance", careless)
    monkeypatch.setattr(Model, "__deepcopy__", lambda model, _: model, raising=False)
    assert failed(wholeness.copies(lab), "the original: changed by its copies")


def test_streams_behind_the_model_fail_the_claim_on_threads(laboratory, monkeypatch):
    """Words that all threads draw from one place, whatever stream each was given."""
    shared = Stream(0, "inference")
    lab = laboratory()
    monkeypatch.setattr(generation.Row, "stream", shared)
    assert failed(wholeness.threads(lab), "together: other texts")


def test_text_drawn_from_the_optimizers_stream_fails_the_claim_on_threads(laboratory, monkeypatch):
    generate = Run.generate

    def careless(run, *arguments, **options):
        run.streams["optimizer"].word()
        return generate(run, *arguments, **options)

    lab = laboratory()
    monkeypatch.setattr(Run, "generate", careless)
    assert failed(wholeness.threads(lab), "while training: other")


def test_an_error_in_the_other_thread_fails_the_claim_on_threads(laboratory, monkeypatch):
    def fails(run, *_, **__):
        raise ValueError("no")

    lab = laboratory()
    monkeypatch.setattr(Run, "generate", fails)
    assert failed(wholeness.threads(lab), "the other thread: ValueError('no')")


# ── Environments ─────────────────────────────────────────────────────────────────────────────────


def outcomes(*rows):
    return {str(i): Outcome(*row) for i, row in enumerate(rows)}


@pytest.mark.parametrize("other", ["Prescott", "Haswell"])
def test_one_fingerprint_holds_where_floats_give_two(other):
    claim = judge(("a", []), outcomes(("a", "x", "Haswell"), ("a", "y", other)))
    assert (claim.holds, claim.control.caught) == (True, True)


def test_other_fingerprints_fail_and_their_environments_are_named():
    rows = ("a", "x", "Haswell"), ("b", "y", "Prescott"), ("c", "z", "Zen")
    claim = judge(("a", []), outcomes(*rows))
    assert failed(claim, "1: fingerprint b, not a; 2: fingerprint c, not a")


def test_floats_that_agree_on_two_kernels_are_a_control_that_was_not_caught():
    claim = judge(("a", []), outcomes(("a", "x", "Haswell"), ("a", "x", "Prescott")))
    assert (claim.holds, claim.control.caught) == (True, False)
    assert not proven([claim])


def test_where_there_is_one_kernel_nothing_was_tested():
    claim = judge(("a", []), outcomes(("a", "x", "reference"), ("a", "x", "reference")))
    assert claim.holds is None
    assert claim.evidence.startswith("not tested here")
    assert proven([claim])


@pytest.mark.parametrize(
    "setting", [{"optimizer.gradient_clip": 1e-300}, {"optimizer.learning_rate": 5e-324}]
)
def test_where_no_batch_moves_the_weights_no_order_of_sums_was_tested(laboratory, setting):
    assert not laboratory().blindness()
    blindness = laboratory(setting).blindness()
    alike = outcomes(("a", "x", "Haswell"), ("a", "x", "Prescott"))
    of_workers = trained(("a", [], "x"), ("a", [], "x"))
    for claim in (
        judge(("a", []), alike, blindness),
        workers.judge(("a", []), of_workers, "steps", blindness),
    ):
        assert (claim.holds, claim.evidence) == (
            None,
            "not tested here: other batches give the same weights, too",
        )
    caught = outcomes(("a", "x", "Haswell"), ("a", "y", "Prescott"))
    assert judge(("a", []), caught, blindness).holds


def test_a_failed_process_fails_the_claim_and_code_the_processor_lacks_is_left_out():
    outcome = {"a": Outcome("f", "x", "k"), "b": Outcome(failure="MemoryError")}
    assert failed(judge(("f", []), outcome), "b: MemoryError")
    outcome["b"] = Outcome(failure="signal 4", unavailable=True)
    assert judge(("f", []), outcome).holds is None


def test_a_sub_process_reports_its_kernel_or_why_it_failed(tmp_path, laboratory):
    path = tmp_path / "config.toml"
    lab = laboratory()
    path.write_text(lab.config.to_toml())
    run = lab.run()
    lab.train(run)
    outcome = train_in(Environment("plain", {}, numba=False), path, lab.start)
    assert outcome.fingerprint == run.fingerprint != outcome.float_fingerprint
    assert outcome.kernel
    failure = train_in(Environment("plain", {}), tmp_path / "none.toml", lab.start).failure
    assert "none.toml" in failure


@pytest.mark.parametrize("name", ["OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES"])
def test_a_kernel_that_this_process_was_given_is_none_of_an_environment(monkeypatch, name):
    given = []

    def start(*_, variables, **__):
        given.append(variables)
        return subprocess.CompletedProcess([], 0, b"{}", b"")

    monkeypatch.setattr(environments, "start", start)
    monkeypatch.setenv(name, "a kernel")
    train_in(Environment("plain", {"MINE": "1"}), Path("config.toml"), Path("start"))
    assert (given[0]["MINE"], name in given[0]) == ("1", False)


def test_a_sub_process_looks_for_modules_where_this_one_does(monkeypatch):
    given = []
    monkeypatch.setattr(subprocess, "run", lambda _, env, **more: given.append(env))
    monkeypatch.setattr(sys, "path", ["of the script", "one", "other"])
    environments.start(variables={})
    root = str(Path(environments.__file__).parents[2])
    assert given == [{"PYTHONPATH": os.pathsep.join([root, "one", "other"])}]


@pytest.mark.parametrize(("plain_dies", "unavailable"), [(True, True), (False, False)])
def test_a_process_killed_by_a_signal_is_left_out_only_where_plain_numpy_is_killed_too(
    monkeypatch, plain_dies, unavailable
):
    def start(path, checkpoint, *options, **_):
        status = -11 if plain_dies or not options else 0
        return subprocess.CompletedProcess([], status, b"", b"")

    monkeypatch.setattr(environments, "start", start)
    outcome = train_in(Environment("plain", {}), Path("config.toml"), Path("start"))
    assert (outcome.failure, outcome.unavailable) == ("killed by signal 11", unavailable)


# ── Workers ──────────────────────────────────────────────────────────────────────────────────────


def trained(*rows):
    return {
        f"{count} processes": Outcome(fingerprint, floats, losses=losses)
        for count, (fingerprint, losses, floats) in enumerate(rows, start=1)
    }


def test_the_losses_and_weights_of_one_process_hold_where_floats_differ():
    claim = workers.judge(("a", ["1"]), trained(("a", ["1"], "x"), ("a", ["1"], "y")), "steps")
    assert (claim.holds, claim.control.caught) == (True, True)
    assert "shared by 1, 2 processes" in claim.evidence


@pytest.mark.parametrize(
    ("other", "told"),
    [(("b", ["1"], "y"), "fingerprint b, not a"), (("a", ["2"], "y"), "other losses")],
)
def test_other_losses_or_weights_fail_and_the_number_of_processes_is_named(other, told):
    claim = workers.judge(("a", ["1"]), trained(("a", ["1"], "x"), other), "steps")
    assert failed(claim, f"2 processes: {told}")


def test_floats_that_agree_for_any_number_are_a_control_that_was_not_caught():
    claim = workers.judge(("a", ["1"]), trained(("a", ["1"], "x"), ("a", ["1"], "x")), "steps")
    assert not proven([claim])


def test_workers_that_disagree_fail_the_claim():
    outcome = Outcome(failure="all workers must have the same fingerprint")
    assert failed(
        workers.judge(("a", []), {"2 processes": outcome}, ""), "2 processes: all workers must"
    )


def test_where_mpi_is_absent_nothing_was_tested(laboratory, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(workers.sys, "executable", "/nowhere/python")
    claim = workers.workers(laboratory())
    assert claim.holds is None
    assert claim.evidence == "not tested here: MPI is absent (pip install 'minigen[mpi]')"
    assert proven([claim])


# ── The command ──────────────────────────────────────────────────────────────────────────────────


def test_a_claim_that_could_not_be_tested_counts_as_neither():
    held = Claim("a", True, "", Control("", True))
    untested = Claim("b", None, "", Control("", False))
    assert proven([held, untested])
    assert not proven([held, Claim("c", False, "", Control("", True))])
    assert not proven([held, Claim("d", True, "", Control("", False))])


def prove(capsys, *options, text):
    changes = [part for item in SMALL.items() for part in ("--set", "{}={}".format(*item))]
    status = command(["prove", "--text", str(text), *changes, *options])
    return status, *capsys.readouterr()


def test_the_command_proves_a_config_and_prints_json(tmp_path, capsys):
    """All of it once, sub-processes too."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    status, out, err = prove(capsys, "--json", text=text)
    assert (status, out.count("\n")) == (0, 1)
    result = json.loads(out)
    assert sorted(result) == ["claims", "holds"]
    assert result["holds"] is True
    assert [claim["name"] for claim in result["claims"]] == [
        "sampling",
        "evaluation",
        "resume",
        "interrupt",
        "copy",
        "decoding does not train",
        "replay",
        "threads",
        "incremental = whole",
        "micro-batches",
        "environment",
        "workers",
    ]
    for claim in result["claims"]:
        assert sorted(claim) == ["control", "evidence", "holds", "name"]
        assert sorted(claim["control"]) == ["caught", "description"]
    assert len(err.splitlines()) == len(EXPERIMENTS)


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim("x", False, "it differs", Control("broken", True)), ("FAILS", "it differs")),
        (Claim("x", True, "", Control("broken", False)), ("holds", "NOT CAUGHT")),
    ],
)
def test_a_failed_claim_or_an_uncaught_control_is_exit_status_1(
    tmp_path, capsys, monkeypatch, claim, words
):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    held = Claim("held", True, "the same", Control("broken", True))
    monkeypatch.setattr(proving, "EXPERIMENTS", (lambda lab: held, lambda lab: claim))
    status, out, _ = prove(capsys, text=text)
    assert status == 1
    for word in (*words, "Not everything holds."):
        assert word in out
    assert prove(capsys, "--json", text=text)[0] == 1
    monkeypatch.setattr(proving, "EXPERIMENTS", (lambda lab: held,))
    assert prove(capsys, text=text)[0] == 0


def test_each_claim_and_its_control_is_a_row(capsys, monkeypatch):
    """Longer texts go on below, in lines of sixty characters."""
    told = f"{'a' * 30} {'b' * 30}"  # a character more than one line
    held = Claim("held", True, told, Control("broken", True))
    wrong = Claim("wrong", False, "it differs", Control("of no use", False))
    untested = Claim("untested", None, "", Control("nor this", False))
    rows = {
        held: [
            f"held                    holds           {'a' * 30}",
            f"                                        {'b' * 30}",
            "  control               caught          broken",
        ],
        wrong: [
            "wrong                   FAILS           it differs",
            "  control               NOT CAUGHT      of no use",
        ],
        untested: [
            "untested                untested        ",
            "  control               untested        nor this",
        ],
    }
    for claims, conclusion, status in (
        ([held], "Everything holds.", 0),
        ([held, untested], "Everything that could be tested here holds.", 0),
        ([held, wrong, untested], "Not everything holds.", 1),
    ):
        tried = [lambda lab, one=claim: one for claim in claims]
        monkeypatch.setattr(proving, "EXPERIMENTS", tried)
        assert command(["prove"]) == status
        lines = [line for claim in claims for line in rows[claim]]
        assert capsys.readouterr().out.splitlines() == [*lines, "", conclusion]
        assert command(["prove", "--json"]) == status
        assert json.loads(capsys.readouterr().out) == {
            "claims": [
                {
                    "name": claim.name,
                    "holds": claim.holds,
                    "evidence": claim.evidence,
                    "control": {
                        "description": claim.control.description,
                        "caught": claim.control.caught,
                    },
                }
                for claim in claims
            ],
            "holds": status == 0,
        }
