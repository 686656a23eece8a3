"""Verification: a checkpoint is what its config gives, or the first thing that is not is named."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import nullcontext
from multiprocessing import active_children

import numpy as np
import pytest

from minigen import Config, Run
from minigen.cli import proving
from minigen.cli import run as command
from minigen.cli.progress import notes_of_libraries
from minigen.errors import MinigenError
from minigen.proof import verification
from minigen.proof.workers import mpiexec
from minigen.training import pool
from minigen.training.checkpoint import load, save
from minigen.training.workers import Workers

pytestmark = pytest.mark.filterwarnings("default:.*has lost, doubled or changed a line")

TEXT = "The fox saw the grapes. The grapes were high. The fox said: they are sour.\n" * 4
STEPS = 6
SETTINGS = {
    "training.steps": STEPS,
    "training.batch_size": 8,
    "corpus.documents": "line",
    "tokenizer.vocab_size": 270,
    "model.context_length": 2,
    "model.embedding_dim": 3,
    "optimizer.learning_rate": 0.01,
    "optimizer.warmup_steps": 2,
    "evaluation.every": 2,
    "sampling.every": 2,
    "sampling.max_new_tokens": 4,
    "checkpoint.every": 4,
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path, text, capsys):
    """A run folder of six steps."""
    changes = [part for item in SETTINGS.items() for part in ("--set", "{}={}".format(*item))]
    assert command(["train", "--text", str(text), *changes, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    return tmp_path / "run"


@pytest.fixture
def verify(capsys):
    """Run the command; return its exit status, stdout and stderr."""

    def call(model, *options):
        status = command(["verify", str(model), *options])
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return status, output.out, output.err

    return call


def last(folder):
    return folder / f"step-{STEPS:06d}.safetensors"


def change(path, **changes):
    """Change what a checkpoint holds; its checksums are made right again."""
    changed = path.with_suffix(".changed")  # no step of its own
    save(changed, dataclasses.replace(load(path), **changes))
    changed.replace(path)


def change_tensor(path, name, index=(0,), by=2.0**-52):
    tensors = {key: tensor.copy() for key, tensor in load(path).tensors.items()}
    tensors[name][index] += by
    change(path, tensors=tensors)


def verdict(verify, folder, *options):
    """Return exit status and the JSON of a verification."""
    status, out, _ = verify(folder, "--json", *options)
    return status, json.loads(out)


# ── What is right ────────────────────────────────────────────────────────────────────────────────


def test_a_run_folder_is_verified(folder, verify):
    status, out, err = verify(folder)
    assert (status, err) == (0, f"training {STEPS} steps again\n")
    first, *segments, conclusion = [
        f"file           {last(folder)}, step 6",
        "segment        step 0 to 4: the same",
        "segment        step 4 to 6: the same",
        "verified: the same weights, moments, merges and batches, bit for bit",
    ]
    held = f"fingerprint    {Run.load(folder).fingerprint}"
    again = f"trained again  {Run.load(folder).fingerprint}"
    assert out.splitlines() == [first, held, again, *segments, conclusion]
    assert verify(last(folder))[1].splitlines() == [first, held, again, conclusion]
    drawn = [verify(folder, "--segments", "1", "--seed", str(seed))[1] for seed in range(3)]
    share = [conclusion.replace(":", f": {percent} of the steps:") for percent in ("67%", "33%")]
    assert {tuple(out.splitlines()) for out in drawn} == {
        (first, held, segments[0], share[0]),
        (first, held, again, segments[1], share[1]),
    }


@pytest.mark.parametrize("step", [0, 4])
def test_so_is_a_checkpoint_from_the_middle_of_a_run(folder, verify, step):
    status, out, _ = verify(folder / f"step-{step:06d}.safetensors")
    assert status == 0
    assert f"step {step}\n" in out


def test_a_checkpoint_away_from_its_folder_needs_its_text_again(folder, text, tmp_path, verify):
    path = shutil.copy(last(folder), tmp_path / "alone.safetensors")
    status, _, err = verify(path)
    assert status == 1
    assert "give that text with --text" in err
    assert verify(path, "--text", str(text))[0] == 0


def test_the_embedded_text_needs_no_path(tmp_path, verify):
    overrides = {key: SETTINGS[key] for key in SETTINGS if not key.startswith("corpus")}
    run = Run(Config.load("fables", {**overrides, "training.steps": 2}))
    run.train()
    run.save(tmp_path / "model.safetensors")
    assert verify(tmp_path / "model.safetensors")[0] == 0


@pytest.mark.parametrize(
    "settings",
    [{"optimizer.name": "sgd"}, {"training.micro_batches": 3}, {"sampling.every": 0}],
    ids=str,
)
def test_any_optimizer_and_any_number_of_parts_is_verified(settings, tmp_path, text, verify):
    config = Config.load("fables", {**SETTINGS, **settings, "corpus.text": [str(text)]})
    run = Run(config)
    run.train(3)
    run.save(tmp_path / "x.safetensors")
    assert verify(tmp_path / "x.safetensors", "--text", str(text))[0] == 0


def test_text_asked_for_by_hand_is_no_fault(folder, verify):
    run = Run.load(folder)
    run.generate("The", max_new_tokens=3, min_new_tokens=3)
    run.save(last(folder))
    status, _, err = verify(folder)
    assert status == 0
    assert "text was asked for by hand" in err


def test_neither_a_damaged_nor_a_foreign_log_matters_to_a_checkpoint_that_is_right(folder, verify):
    doubt = "metrics.jsonl has lost, doubled or changed a line that"
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss_bits"\n[]\n')
    status, _, err = verify(folder)
    assert (status, doubt in err) == (0, True)
    (folder / "metrics.jsonl").unlink()
    status, _, err = verify(folder)
    assert (status, doubt in err) == (0, True)


# ── What is wrong ────────────────────────────────────────────────────────────────────────────────


def test_a_changed_byte_is_refused_by_the_checksum_before_any_training(folder, verify, monkeypatch):
    monkeypatch.setattr(Run, "steps", None)
    data = bytearray(last(folder).read_bytes())
    data[-1] ^= 1
    last(folder).write_bytes(data)
    status, out, err = verify(folder)
    assert (status, out) == (1, "")
    assert "it is damaged" in err


@pytest.mark.parametrize("name", ["E", "W", "b", "m.W", "v.b"])
def test_a_changed_tensor_with_a_right_checksum_is_named(folder, verify, name):
    change_tensor(last(folder), name)
    status, out, err = verify(folder)
    assert status == 1
    named = [line for line in out.splitlines() if line.startswith("tensor")]
    assert [line.split(":")[0] for line in named] == [f"tensor {name}"]
    assert err.endswith(
        f"{last(folder)} is not what follows from step-000004.safetensors: 1 differences in the "
        f"segment from step 4 to 6, the first in {named[0]}\n"
    )
    assert "verified" not in out
    assert "metrics.jsonl agrees at all 2 steps: the file was changed after training" in out


def test_the_numbers_that_differ_are_counted_and_the_first_is_located(folder, verify):
    change_tensor(last(folder), "W", index=(2, 1, slice(100, 103)), by=0.5)
    _, out, _ = verify(folder)
    assert "tensor W: 3 of 1620 numbers differ, the first at (2, 1, 100), by 0.5 at most" in out


def test_a_zero_whose_sign_was_changed_is_found(folder, verify):
    tensors = load(last(folder)).tensors
    zeros = np.argwhere(tensors["m.E"] == 0.0)
    tensors["m.E"][tuple(zeros[0])] *= -1.0
    change(last(folder), tensors=tensors)
    status, out, _ = verify(folder)
    assert status == 1
    assert "tensor m.E" in out


def test_the_first_step_at_which_the_log_differs_is_named(folder, text, verify):
    """A run of another machine, say, that went its own way from step 3 on."""
    other = Run(Config.load(folder / "config.toml"))
    lines = []
    for record in other.steps():
        if record.step == 2:
            other.model.parameters["E"][:, 0] += 2.0**-9
            other.model.changed()
        lines.append(json.dumps(record.metrics()) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    other.save(last(folder))
    status, out, _ = verify(folder)
    assert status == 1
    assert "metrics.jsonl differs first at step 3: loss_bits 0x1." in out
    assert "tensor E" in out


def test_without_a_log_that_is_said(folder, verify):
    change_tensor(last(folder), "b")
    (folder / "metrics.jsonl").unlink()
    assert "no metrics.jsonl is beside the file" in verify(folder)[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"streams": {"optimizer": 7, "inference": 0}}, "stream optimizer at word 7, trained"),
        ({"step": 5}, "is of step 5, whatever its name says"),
    ],
)
def test_a_changed_position_or_step_is_found(folder, verify, changes, named):
    change(last(folder), **changes)
    status, out, err = verify(folder)
    assert status == 1
    assert named in out + err


def test_other_merges_are_found(folder, verify):
    merges = load(last(folder)).tokenizer["merges"]
    change(last(folder), tokenizer={"merges": [*merges[:-1], [ord("z"), ord("z")]]})
    status, out, _ = verify(folder)
    assert status == 1
    assert out.splitlines()[-2] == "tokenizer: other merges than the text gives"


def test_another_seed_inside_the_file_is_found(folder, text, verify):
    saved = load(last(folder))
    change(last(folder), config={**saved.config, "run": {"seed": 1}})
    (folder / "config.toml").unlink()
    status, out, _ = verify(last(folder), "--text", str(text))
    assert status == 1
    assert "differs first at step 1" in out
    _, out, _ = verify(folder, "--text", str(text))
    assert "config: run.seed is 0 in it and 1 in the last checkpoint" in out


def test_a_step_behind_the_last_is_refused(folder, verify):
    change(last(folder), step=STEPS + 1)
    last(folder).rename(folder / f"step-{STEPS + 1:06d}.safetensors")
    status, _, err = verify(folder)
    assert status == 1
    assert "it is at step 7 of training.steps = 6" in err


# ── Segments ─────────────────────────────────────────────────────────────────────────────────────


def test_every_segment_between_two_checkpoints_is_checked(folder, verify):
    segments = [{"from": 0, "to": 4, "holds": True}, {"from": 4, "to": 6, "holds": True}]
    expected = {"verified": True, "segments": segments, "share": 1.0}
    assert verdict(verify, folder) == (0, expected)


def test_segments_side_by_side_say_the_same(folder, verify, monkeypatch):
    """In processes, which a run of this size is not worth."""
    change_tensor(last(folder), "E")
    one_after_the_other = verify(folder)
    monkeypatch.setattr(verification, "WORTH_PROCESSES", 0)
    assert verify(folder) == one_after_the_other
    assert re.search(r" 6/6 \[.*(step/s|s/step)\]", verify(folder, "--progress")[2])


def test_processes_help_only_where_that_is_worth_it_and_there_are_cores(
    folder, verify, monkeypatch
):
    asked = []
    whole = pool.pool
    monkeypatch.setattr(
        pool, "pool", lambda *args, **options: asked.append((args[1:], options)) or whole(*args)
    )
    once = [((2,), {"joins": True, "within": notes_of_libraries})]
    for worth, cores, used in ((1 << 28, 1, []), (0, 0, []), (0, 1, once)):
        monkeypatch.setattr(verification, "WORTH_PROCESSES", worth)
        monkeypatch.setattr(pool, "helpers", lambda _, count=cores: count)
        assert (verify(folder)[0], asked) == (0, used)


def test_what_goes_wrong_in_a_helper_is_told(folder, verify, monkeypatch):
    class Broken:
        def submit(self, *_):
            future = Future()
            future.set_exception(MinigenError("it was killed"))
            return future

    monkeypatch.setattr(verification, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(pool, "helpers", lambda _: 1)
    monkeypatch.setattr(pool, "pool", lambda *_, **__: nullcontext(Broken()))
    assert verify(folder) == (1, "", "training 6 steps again\nError: it was killed\n")


@pytest.mark.parametrize(
    ("size", "done"),
    [(1, ["helped", "read", "checked"]), (2, ["the first worker:", "read", "helped", "checked"])],
)
def test_the_text_is_read_while_helpers_work_and_before_if_others_must_hear_of_a_failure(
    folder, monkeypatch, size, done
):
    found = []

    class Helpful:
        def submit(self, *_):
            found.append("helped")
            future = Future()
            future.set_result("theirs")
            return future

    workers = Workers()
    workers.size = size
    workers.from_first = lambda work: found.append("the first worker:") or work()
    monkeypatch.setattr(verification, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(pool, "helpers", lambda _: 1)
    monkeypatch.setattr(pool, "pool", lambda *_, **__: nullcontext(Helpful()))
    monkeypatch.setattr("minigen.model.parallel.use_threads", lambda count: None)
    one = verification.Verification(folder)
    monkeypatch.setattr(one, "read", lambda _: found.append("read"))
    monkeypatch.setattr(verification, "check", lambda *_: found.append("checked") or "ours")
    assert (proving._check_all([one], workers, None), found) == (["theirs", "ours"], done)


def endless(_segment, _fresh=None, on_step=None):
    """Stand in for ``check``: in a helper it does not come to an end."""
    on_step(None) if on_step else time.sleep(600)


def interrupt(*_):
    raise KeyboardInterrupt


def refuse(*_):
    raise MinigenError("the text is another one")


def kill(*_):
    for process in active_children():
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("read", "status", "told"),
    [
        (interrupt, 130, "interrupted"),
        (refuse, 1, "is another one"),
        (kill, 1, "was killed, for w"),
    ],
    ids=["interrupted", "refused", "killed"],
)
def test_whatever_happens_while_helpers_work_is_said_in_a_line_and_ends_them(
    folder, verify, monkeypatch, caplog, read, status, told
):
    monkeypatch.setattr(verification, "WORTH_PROCESSES", 0)
    monkeypatch.setattr("minigen.training.pool.cores", lambda: {0, 1})
    monkeypatch.setattr(verification, "check", endless)
    monkeypatch.setattr(verification.Verification, "read", read)
    found, out, err = verify(folder)
    assert (found, out) == (status, "")
    assert told in err.splitlines()[-1]
    assert not caplog.records
    assert not active_children()


def test_a_forged_checkpoint_in_the_middle_is_named_with_its_segment(folder, verify):
    """Its checksums are right, and what follows from it is what it gives: only one link is weak."""
    middle = folder / "step-000004.safetensors"
    change_tensor(middle, "E", (3, 1), by=2.0**-30)
    forged = Run.load(middle, config=Config.load(folder / "config.toml"))
    forged.train()
    forged.save(last(folder))
    status, out, err = verify(folder)
    assert status == 1
    assert "segment        step 0 to 4: differs, in step-000004.safetensors" in out
    assert "segment        step 4 to 6: the same" in out
    assert "step-000004.safetensors is not what its config gives: 1 differences in the seg" in err
    _, found = verdict(verify, folder)
    assert [segment["holds"] for segment in found["segments"]] == [False, True]
    assert not found["verified"]


def test_the_first_checkpoint_must_be_what_the_config_gives(folder, verify):
    change_tensor(folder / "step-000000.safetensors", "W", (0, 0, 0))
    status, out, err = verify(folder)
    assert status == 1
    assert "step 0 to 4: differs, in step-000000.safetensors" in out
    assert "step-000000.safetensors is not what its config gives" in err


def test_a_damaged_checkpoint_in_the_middle_is_a_segment_that_differs(folder, verify):
    middle = folder / "step-000004.safetensors"
    middle.write_bytes(middle.read_bytes()[:-1])
    status, _, err = verify(folder)
    assert status == 1
    assert "step-000004.safetensors: it is damaged" in err
    assert verdict(verify, folder)[0] == 1


def test_a_checkpoint_under_the_name_of_another_step_is_refused(folder, verify):
    shutil.copy(folder / "step-000004.safetensors", folder / "step-000005.safetensors")
    status, _, err = verify(folder)
    assert status == 1
    assert "step-000005.safetensors" in err


def test_some_segments_are_drawn_and_their_share_is_said(folder, verify):
    drawn = []
    for seed in range(6):
        status, found = verdict(verify, folder, "--segments", "1", "--seed", str(seed))
        assert status == 0
        [segment] = found["segments"]
        assert found["share"] == (segment["to"] - segment["from"]) / STEPS
        drawn.append(segment["from"])
    assert set(drawn) == {0, 4}
    assert [verdict(verify, folder, "--segments", "1")[1]["segments"][0]["from"]] == drawn[:1]
    assert verdict(verify, folder, "--segments", "9")[1]["share"] == 1.0
    assert "of the steps: the same weights" in verify(folder, "--segments", "1")[1]


def test_a_folder_that_lost_its_first_checkpoints_is_verified_from_its_config(folder, verify):
    (folder / "step-000000.safetensors").unlink()
    (folder / "step-000004.safetensors").unlink()
    _, found = verdict(verify, folder)
    assert found["segments"] == [{"from": 0, "to": 6, "holds": True}]


def test_a_seed_that_draws_nothing_is_a_usage_error(folder, verify):
    status, _, err = verify(folder, "--seed", "1")
    assert (status, "give --segments too" in err) == (2, True)


@pytest.mark.slow
def test_the_processes_of_mpiexec_share_the_segments(folder):
    command = [mpiexec(), "-n", "3", sys.executable, "-m", "minigen", "verify", str(folder)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [segment["to"] for segment in json.loads(done.stdout)["segments"]] == [4, 6]
    change_tensor(folder / "step-000004.safetensors", "b")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "step-000004.safetensors is not what its config gives" in done.stderr


# ── Text and config beside the file ──────────────────────────────────────────────────────────────


def test_a_changed_text_is_named_by_its_hash_before_any_training(folder, text, verify, monkeypatch):
    monkeypatch.setattr(Run, "steps", None)
    text.write_text(TEXT + "!")
    status, out, err = verify(folder)
    assert (status, out) == (1, "")
    assert load(last(folder)).corpus_sha256 in err
    assert "its SHA-256 is" in err


def test_a_missing_text_is_named(folder, text, verify):
    text.unlink()
    status, _, err = verify(folder)
    assert status == 1
    assert str(text) in err


def test_a_config_beside_the_file_that_disagrees_is_named_key_by_key(folder, verify, monkeypatch):
    monkeypatch.setattr(Run, "steps", None)
    config = Config.load(folder / "config.toml", {"optimizer.learning_rate": 0.5, "run.seed": 3})
    (folder / "config.toml").write_text(config.to_toml())
    status, out, err = verify(folder)
    assert (status, out) == (1, "")
    assert "optimizer.learning_rate is 0.5 in it and 0.01 in step-000006.safetensors" in err
    assert "run.seed is 3 in it and 0 in" in err
    assert err.count("\n") == 1


def test_keys_that_do_not_decide_the_weights_may_differ(folder, verify):
    changes = {"sampling.prompt": "Twice", "evaluation.every": 0, "training.micro_batches": 2}
    config = Config.load(folder / "config.toml", changes)
    (folder / "config.toml").write_text(config.to_toml())
    assert verify(folder)[0] == 0


def test_a_config_beside_the_file_that_names_the_embedded_text_instead_disagrees(folder, verify):
    config = Config.load(folder / "config.toml", {"corpus.text": "fables"})
    (folder / "config.toml").write_text(config.to_toml())
    status, _, err = verify(folder)
    assert status == 1
    assert "corpus.text is 'fables' in it and 'external' in" in err


def test_text_that_came_from_standard_input_is_asked_for(folder, text, verify):
    config = Config.load(folder / "config.toml", {"corpus.text": ["-"]})
    (folder / "config.toml").write_text(config.to_toml())
    status, _, err = verify(folder)
    assert status == 1
    assert "give that text with --text" in err
    assert verify(folder, "--text", str(text))[0] == 0


def test_tensors_that_training_again_does_not_give_are_listed_in_order(folder):
    again = load(folder / "step-000006.safetensors")
    odd = {f"{letter}.b": again.tensors["b"] for letter in "zyxwutsrq"}
    saved = dataclasses.replace(again, tensors=again.tensors | odd)
    told = [f"tensor {letter}.b: not there" for letter in "qrstuwxyz"]
    assert verification.compare(saved, again) == told
