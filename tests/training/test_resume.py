"""A run that was stopped, in whatever way, and taken up again ends as one that never was."""

import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from minigen import Config, MinigenError, Run
from minigen import cli as command_line
from minigen.errors import OptionError
from minigen.training import checkpoint
from minigen.training.checkpoint import load, locate, save
from minigen.training.folder import RunFolder
from tests.conftest import PATIENCE

STEPS = 10
TEXT = "The fox saw the grapes. The grapes were high. The fox said: they are sour.\n" * 4
SETTINGS = {
    "training.steps": STEPS,
    "training.batch_size": 8,
    "corpus.documents": "line",
    "tokenizer.vocab_size": 257,
    "model.context_length": 2,
    "model.embedding_dim": 3,
    "optimizer.warmup_steps": 4,
    "evaluation.every": 3,
    "sampling.every": 2,
    "sampling.max_new_tokens": 6,
    "checkpoint.every": 4,
}
CONFIG = Config.load("fables", SETTINGS)


def new_run(config=CONFIG):
    return Run(config, text=TEXT)


def saved_bytes(run, tmp_path):
    run.save(tmp_path / "end.safetensors")
    return (tmp_path / "end.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records and the final file of a run without a stop."""
    run = new_run()
    return run.train(), saved_bytes(run, tmp_path_factory.mktemp("whole"))


def stopped_at(stops, tmp_path, config=CONFIG):
    """Train with a stop, a save and a load after each of some steps."""
    run, records = new_run(config), []
    for stop in stops:
        records += run.train(stop - run.step)
        run.save(tmp_path / "stopped.safetensors")
        del run
        run = Run.load(tmp_path / "stopped.safetensors", text=TEXT)
    records += run.steps()
    return records, saved_bytes(run, tmp_path)


@pytest.mark.parametrize(
    "stops",
    [[0], [1], [2], [5], [STEPS], [3, 5, 7], [4, 4], range(STEPS + 1)],
    ids=lambda stops: ",".join(map(str, stops)),
)
def test_batches_losses_samples_weights_and_the_final_file_are_as_without_a_stop(
    stops, tmp_path, whole
):
    """Field reports 4, 5, 6 and 27; step 1 to 4 is the warm-up, samples come at even steps."""
    assert stopped_at(stops, tmp_path) == whole


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.name": "sgd"},
        {"optimizer.decay": "constant", "optimizer.warmup_steps": 0},
        {"optimizer.decay": "linear", "training.micro_batches": 3},
        {"corpus.validation_fraction": 0.0, "training.batch_size": 1},
    ],
    ids=str,
)
def test_so_they_are_with_any_optimizer_schedule_and_batch(settings, tmp_path):
    config = CONFIG.override(settings)
    run = new_run(config)
    assert stopped_at([3, 4], tmp_path, config) == (run.train(), saved_bytes(run, tmp_path))


def test_text_asked_for_by_hand_goes_on_after_a_resume_where_it_stood(tmp_path):
    run = new_run()
    run.train(3)
    run.generate("The", max_new_tokens=5)
    run.save(tmp_path / "x")
    again = Run.load(tmp_path / "x")
    text = run.generate("The", max_new_tokens=9, min_new_tokens=9)
    assert again.generate("The", max_new_tokens=9, min_new_tokens=9) == text


def test_a_resume_that_forgot_a_streams_position_would_be_seen(tmp_path, whole):
    """The control of the tests above."""
    run = new_run()
    records = run.train(5)
    run.save(tmp_path / "stopped.safetensors")
    run = Run.load(tmp_path / "stopped.safetensors", text=TEXT)
    run.streams["optimizer"].position = 0
    assert records + run.train() != whole[0]
    with pytest.raises(MinigenError, match=r"after 10 steps of 8 .* must be at word 80 \(got 40\)"):
        run.save(tmp_path / "x")


def test_after_the_last_step_nothing_is_left_to_train(tmp_path, whole):
    """Field report 5."""
    run = new_run()
    run.train()
    run.save(tmp_path / "x")
    run = Run.load(tmp_path / "x", text=TEXT)
    assert list(run.steps()) == []
    with pytest.raises(OptionError, match=r"^all \d+ steps of training.steps are done"):
        run.train(1)


def test_no_second_iterator_trains_past_the_last_step():
    run = new_run()
    first, second = run.steps(), run.steps(3)
    next(second)
    with pytest.raises(OptionError, match=f"all {STEPS} steps of training.steps are done"):
        assert len(list(first)) == STEPS
    assert run.step == STEPS
    with pytest.raises(OptionError):
        next(second)


def test_positions_may_be_set_to_numbers_of_numpy(tmp_path):
    run = new_run()
    run.streams["inference"].position = np.int64(5)
    run.save(tmp_path / "x")
    assert Run.load(tmp_path / "x").streams["inference"].position == 5


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"step": 10**9}, f"it is at step {10**9} of training.steps = {STEPS}"),
        ({"tensors": dict(new_run().model.parameters)}, "lacks what adamw needs to go on: m.E, "),
    ],
    ids=["step", "moments"],
)
def test_a_checkpoint_from_which_no_run_can_go_on_is_refused(change, cause, tmp_path):
    run = new_run()
    run.save(tmp_path / "x")
    save(tmp_path / "x", dataclasses.replace(load(tmp_path / "x"), **change))
    with pytest.raises(MinigenError, match=cause):
        Run.load(tmp_path / "x")


def test_another_text_is_refused_by_its_hash(tmp_path):
    run = new_run()
    run.save(tmp_path / "x")
    with pytest.raises(MinigenError, match="not the one this run was trained on"):
        Run.load(tmp_path / "x", text=TEXT + "!")
    with pytest.raises(MinigenError, match="a text that is not in it"):
        Run.load(tmp_path / "x").train()


def test_how_the_text_was_cut_is_recorded_and_another_cut_is_refused_by_name(tmp_path):
    """One text and a list of documents may be the same bytes, and are other tokens."""
    cut, listed = new_run(), Run(CONFIG, text=[TEXT])
    assert (cut.config.corpus.documents, listed.config.corpus.documents) == ("line", "file")
    assert cut.corpus_sha256 == listed.corpus_sha256
    cut.save(tmp_path / "cut")
    listed.save(tmp_path / "listed")
    with pytest.raises(MinigenError, match=r"corpus.documents = 'line', not given as a list"):
        Run.load(tmp_path / "cut", text=[TEXT])
    with pytest.raises(MinigenError, match=r"corpus\.documents cannot change"):
        Run.load(tmp_path / "listed", text=TEXT, config=cut.config)
    again = Run.load(tmp_path / "listed", text=[TEXT])
    assert again.train(2) == listed.train(2) != cut.train(2)
    parts = Run(CONFIG, text=[TEXT, TEXT])
    parts.save(tmp_path / "parts")
    with pytest.raises(MinigenError, match="not the one this run was trained on"):
        Run.load(tmp_path / "parts", text=TEXT + TEXT)


# ── The run folder ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def train_command(text_file, folder, *, steps=STEPS, batch_size=8):
    """The arguments of ``minigen`` that train in a folder."""
    settings = {**SETTINGS, "training.steps": steps, "training.batch_size": batch_size}
    changes = [part for item in settings.items() for part in ("--set", "{}={}".format(*item))]
    return ["train", "--text", str(text_file), *changes, "--out", str(folder)]


def contents(folder):
    """Everything in a run folder that has the same bytes on every machine."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != "timing.jsonl" and not path.name.startswith(".")
    }


def final(folder):
    """What a run that was stopped must share with one that was not."""
    files = contents(folder)
    last = max(name for name in files if name.startswith("step-"))
    return {name: files[name] for name in ("metrics.jsonl", "samples.jsonl", last, "config.toml")}


@pytest.fixture
def unstopped(text_file, tmp_path, capsys):
    assert command_line.run(train_command(text_file, tmp_path / "unstopped")) == 0
    capsys.readouterr()
    return final(tmp_path / "unstopped")


@pytest.mark.parametrize("step", [0, 1, 4, 5, 9])
def test_a_folder_left_at_any_step_is_resumed_to_the_same_bytes(
    step, text_file, tmp_path, unstopped, capsys
):
    """Whatever was logged behind the latest checkpoint is cut off and written again."""
    folder = tmp_path / "stopped"
    config = Config.load("fables", {**SETTINGS, "corpus.text": [str(text_file)]})
    records = RunFolder.create(folder, Run(config)).steps()
    for _ in range(step):
        next(records)
    records.close()
    assert command_line.run(["train", "--resume", "--out", str(folder)]) == 0
    assert final(folder) == unstopped
    assert capsys.readouterr().out.count("fingerprint") == 1


@pytest.mark.parametrize("log", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("cut", [1, 7, 300])
def test_a_log_that_was_cut_short_by_a_crash_is_mended(log, cut, text_file, tmp_path, unstopped):
    folder = tmp_path / "stopped"
    config = Config.load("fables", {**SETTINGS, "corpus.text": [str(text_file)]})
    records = RunFolder.create(folder, Run(config)).steps()
    for _ in range(6):
        next(records)
    records.close()
    (folder / "step-000004.safetensors").unlink()  # back to step 0: all is logged anew
    with open(folder / log, "r+b") as file:
        file.truncate(max(0, os.path.getsize(folder / log) - cut))
    assert command_line.run(["train", "--resume", "--out", str(folder)]) == 0
    assert final(folder) == unstopped


def test_a_finished_run_says_that_nothing_is_left_to_do(text_file, tmp_path, unstopped, capsys):
    """Field report 5."""
    folder = tmp_path / "unstopped"
    before = contents(folder)
    assert command_line.run(["train", "--resume", "--out", str(folder)]) == 0
    assert "nothing left to do: all 10 steps are done" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_checkpoint_without_stream_positions_is_refused_and_no_run_starts_over(
    tmp_path, unstopped, monkeypatch, capsys
):
    """Field report 7."""
    folder = tmp_path / "unstopped"
    saved = load(locate(folder))
    monkeypatch.setattr(checkpoint, "STREAMS", ())
    save(folder / "step-000011.safetensors", dataclasses.replace(saved, streams={}, step=11))
    monkeypatch.undo()
    before = contents(folder)
    assert command_line.run(["train", "--resume", "--out", str(folder)]) == 1
    assert "these streams are missing: inference, optimizer" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_pickle_in_place_of_a_checkpoint_is_refused_unread(tmp_path, unstopped, capsys):
    """Field report 10."""
    folder = tmp_path / "unstopped"
    (folder / "step-000011.safetensors").write_bytes(pickle.dumps(Trap()))
    assert command_line.run(["train", "--resume", "--out", str(folder)]) == 1
    assert "only .safetensors files are read" in capsys.readouterr().err


class Trap:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


# ── Signals ──────────────────────────────────────────────────────────────────────────────────────

COMMAND = [sys.executable, "-c", "from minigen.cli import main; main()"]
LONG = 2_000_000  # steps, of which none sees the end


def start(arguments):
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path, size, process):
    """Wait until a file has grown to a size."""
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_says_how_to_go_on_and_the_resumed_run_ends_the_same(
    number, text_file, tmp_path
):
    folder = tmp_path / "signalled"
    process = start(train_command(text_file, folder, steps=LONG))
    wait_for(folder / "metrics.jsonl", 4000, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    step = max(int(path.name[5:-12]) for path in folder.glob("step-*"))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert f"interrupted at step {step}, saved" in stderr
    assert f"minigen train --resume --out {folder}" in stderr
    assert "Traceback" not in stderr
    assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))

    resumed = RunFolder.resume(folder, Config.load(folder / "config.toml"))
    go_on(resumed, 9)
    resumed.save()
    unstopped = RunFolder.create(tmp_path / "unstopped", Run(resumed.run.config))
    go_on(unstopped, step + 9)
    unstopped.save()
    assert final(folder) == final(unstopped.path)


def go_on(folder, steps):
    records = folder.steps()
    for _ in range(steps):
        next(records)
    records.close()


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_each_time_a_run_ends_as_one_never_killed(
    text_file, tmp_path
):
    """20 kills in one run, each some random bytes of metrics.jsonl further than the last."""
    changes = ["--set", "checkpoint.every=20"]
    whole, folder = tmp_path / "unstopped", tmp_path / "killed"
    arguments = [*train_command(text_file, whole, steps=2000), *changes]
    assert subprocess.run([*COMMAND, *arguments], capture_output=True).returncode == 0
    moments, logged = random.Random(0), folder / "metrics.jsonl"
    process = start([*train_command(text_file, folder, steps=2000), *changes])
    wait_for(logged, 1, process)
    for _ in range(20):
        size = logged.stat().st_size + moments.randrange(6000)
        wait_for(logged, size, process)
        time.sleep(moments.uniform(0.0, 0.01))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        process = start(["train", "--resume", "--out", str(folder)])
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert final(folder) == final(whole)
