"""Twelve prepared pairs of runs, each with one cause: `diff` names it, and what to do about it."""

import dataclasses
import json
import shutil

import pytest

from minigen import Config, Run
from minigen.cli import run as command
from minigen.training.checkpoint import load, save
from minigen.training.folder import RunFolder

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
    "evaluation.every": 0,
    "sampling.every": 0,
    "checkpoint.every": 2,
}


def train(folder, text, **changes):
    """Write a run folder, and return it."""
    path = folder.parent / f"{folder.name}.txt"
    path.write_text(text)
    config = Config.load("fables", {**SETTINGS, "corpus.text": [str(path)], **changes})
    for _ in RunFolder.create(folder, Run(config)).steps():
        pass
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "a", TEXT)


@pytest.fixture
def copy(original, tmp_path):
    """The same run once more, to be changed."""
    return shutil.copytree(original, tmp_path / "b")


@pytest.fixture
def diff(capsys):
    """Run the command; return its exit status, its JSON and what it says to a reader."""

    def call(a, b):
        status = command(["diff", str(a), str(b), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert command(["diff", str(a), str(b)]) == status
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        assert found["same"] == (status == 0) == (not found["differences"])
        told = [
            line
            for one in found["differences"]
            for line in (one["what"], f"  A  {one['a']}", f"  B  {one['b']}")
        ]
        if (step := found["first_step"]) is not None:
            part = f", in its {found['first_part']}" if found["first_part"] else ""
            told.append(f"They part at {f'step {step}' if step else 'the start'}{part}.")
        *lines, last = output.out.splitlines()  # advice, or that both are the same
        assert lines == told
        assert last
        return status, found, output.out + output.err

    return call


def file(folder, step):
    return folder / f"step-{step:06d}.safetensors"


def change(path, tensors=(), **changes):
    """Change what a checkpoint holds; its checksums are made right again."""
    saved = load(path)
    changed = {name: tensor.copy() for name, tensor in saved.tensors.items()}
    for name in tensors:
        changed[name].flat[7] += 2.0**-6
    save(path, dataclasses.replace(saved, tensors=changed, **changes))


def train_on_from_a_changed(folder, step, *, keep, **changes):
    """Change a checkpoint and train on from it; then let it be, or put it back as it was."""
    for later in range(step + 2, STEPS + 1, 2):
        file(folder, later).unlink()
    before = file(folder, step).read_bytes()
    change(file(folder, step), **changes)
    config = Config.load(folder / "config.toml")
    with pytest.MonkeyPatch.context() as careless:  # else a wrong position would be refused
        careless.setattr(Run, "_check_batches", lambda *_: None)
        for _ in RunFolder.resume(folder, config).steps():
            pass
    if not keep:
        file(folder, step).write_bytes(before)


def whats(found):
    return [difference["what"] for difference in found["differences"]]


# ── Nothing differs ──────────────────────────────────────────────────────────────────────────────


def test_a_run_and_its_repetition_are_the_same(original, tmp_path, diff):
    status, found, said = diff(original, train(tmp_path / "b", TEXT))
    assert (status, found) == (
        0,
        {"same": True, "differences": [], "first_step": None, "first_part": None},
    )
    assert "bit for bit" in said


def test_keys_that_decide_nothing_are_told_and_do_not_count(original, tmp_path, diff):
    changes = {"sampling.every": 3, "evaluation.every": 2, "training.micro_batches": 2}
    status, _, said = diff(original, train(tmp_path / "b", TEXT, **changes))
    assert status == 0
    assert "decide no weights: training.micro_batches, evaluation.every, sampling.every" in said


def test_a_checkpoint_and_its_copy_elsewhere_are_the_same(original, tmp_path, diff):
    alone = shutil.copy(file(original, 4), tmp_path / "alone.safetensors")
    assert diff(file(original, 4), alone)[0] == 0


# ── One cause each ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "a", "b", "first_step"),
    [("run.seed", 0, 5, 1), ("optimizer.learning_rate", 0.01, 0.02, 1)],
)
def test_another_key(original, tmp_path, diff, key, a, b, first_step):
    status, found, said = diff(original, train(tmp_path / "b", TEXT, **{key: b}))
    assert status == 1
    assert found["differences"][0] == {"what": f"config {key}", "a": a, "b": b}
    assert (found["first_part"], "Another config" in said) == (None, True)


def test_a_moment_that_only_one_of_them_has(original, tmp_path, diff):
    _, found, _ = diff(original, train(tmp_path / "b", TEXT, **{"optimizer.name": "sgd"}))
    seconds = [one for one in found["differences"] if one["what"].startswith("tensor v.")]
    assert [one["b"] for one in seconds] == [None] * 3


def test_another_text(original, tmp_path, diff):
    status, found, said = diff(original, train(tmp_path / "b", TEXT.replace("fox", "cat")))
    assert status == 1
    assert whats(found)[0] == "text (its SHA-256)"
    assert "Another text" in said


def test_other_merges(original, copy, diff):
    merges = load(file(copy, STEPS)).tokenizer["merges"]
    merges = [*merges[:-1], [ord("z"), ord("z")]]
    change(file(copy, STEPS), tokenizer={"merges": merges})
    status, found, said = diff(original, copy)
    assert status == 1
    assert whats(found) == [f"merges (the first is merge {len(merges) - 1})"]
    assert "the library tokenizers learned otherwise" in said


def test_other_initial_weights(original, copy, diff):
    train_on_from_a_changed(copy, 0, tensors=["E"], keep=True)
    status, found, said = diff(original, copy)
    assert (status, found["first_step"], found["first_part"]) == (1, 0, "weights")
    assert whats(found) == ["initial weights E at the start (1 numbers, the first at 2, 1)"]
    assert "Trained again here, the start is as A has it" in said


def test_another_batch(original, copy, diff, monkeypatch):
    monkeypatch.setattr(Run, "_check_batches", lambda *_: None)  # which would refuse the file
    train_on_from_a_changed(copy, 2, streams={"optimizer": 17, "inference": 0}, keep=False)
    status, found, said = diff(original, copy)
    assert (status, found["first_step"], found["first_part"]) == (1, 3, "batch")
    assert found["differences"][0] == {"what": "optimizer_position of step 3", "a": 24, "b": 25}
    assert "step 3 is as A has it. Train B again" in said


def test_another_loss_alone(original, copy, diff):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[3]["loss_bits"] = (float.fromhex(lines[3]["loss_bits"]) + 2.0**-40).hex()
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for a, b, right in ((original, copy, "A"), (copy, original, "B")):
        status, found, said = diff(a, b)
        assert (status, found["first_step"], found["first_part"]) == (1, 4, "loss")
        assert whats(found) == ["loss_bits of step 4"]
        assert f"step 4 is as {right} has it" in said


def test_another_gradient(original, copy, diff):
    """It has left its mark on the weights and on both moments of one tensor."""
    train_on_from_a_changed(copy, 2, tensors=["W", "m.W", "v.W"], keep=True)
    status, found, said = diff(original, copy)
    assert (status, found["first_step"], found["first_part"]) == (1, 2, "gradient")
    assert [what.split()[1] for what in whats(found)] == ["W", "m.W", "v.W"]
    assert "step 2 is as A has it" in said


@pytest.mark.parametrize(("name", "part"), [("b", "weights"), ("v.E", "moments")])
def test_a_file_that_was_changed_afterwards(original, copy, diff, name, part):
    change(file(copy, 4), tensors=[name])
    status, found, said = diff(original, copy)
    assert (status, found["first_step"], found["first_part"]) == (1, 4, part)
    assert whats(found)[0].startswith(f"tensor {name} after step 4 (1 numbers, the first at")
    assert "step 4 is as A has it" in said


def test_weights_that_went_astray_between_two_checkpoints(original, copy, diff):
    train_on_from_a_changed(copy, 2, tensors=["E", "W", "b"], keep=False)
    file(copy, 2).unlink()
    status, found, _ = diff(original, copy)
    assert (status, found["first_step"], found["first_part"]) == (1, 3, "weights")


def test_one_run_that_went_on_longer(original, copy, diff):
    file(copy, STEPS).unlink()
    status, found, said = diff(original, copy)
    assert status == 1
    assert found["differences"] == [{"what": "step", "a": STEPS, "b": 4}]
    assert "as far as both go they are the same" in said


# ── Where less is there to see ───────────────────────────────────────────────────────────────────


def test_two_lone_checkpoints_that_differ_are_for_verify_to_judge(original, tmp_path, diff):
    a = shutil.copy(file(original, STEPS), tmp_path / "a.safetensors")
    b = shutil.copy(file(original, STEPS), tmp_path / "b.safetensors")
    change(b, tensors=["m.b"])
    status, found, said = diff(a, b)
    assert (status, found["first_step"], found["first_part"]) == (1, STEPS, "moments")
    assert "minigen verify A and minigen verify B say which" in said


def test_a_text_that_is_gone_is_said(original, copy, tmp_path, diff):
    for folder in (one := shutil.copytree(original, tmp_path / "c"), copy):
        settings = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(settings.replace("a.txt", "gone.txt"))
    change(file(copy, 4), tensors=["E"])
    status, _, said = diff(one, copy)
    assert status == 1
    assert "It could not be trained again: " in said
    assert "gone.txt" in said


@pytest.mark.parametrize("step", [2, STEPS])
def test_a_damaged_file_is_named(original, copy, capsys, step):
    file(copy, step).write_bytes(file(copy, step).read_bytes()[:-1])
    assert command(["diff", str(original), str(copy)]) == 1
    assert f"step-{step:06d}.safetensors: it is damaged" in capsys.readouterr().err
