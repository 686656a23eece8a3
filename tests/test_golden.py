"""A checkpoint that an earlier version wrote loads, writes and trains on as it did then.

`tests/data/golden-2.safetensors` stays as it is for as long as its format is read; what it gives is
in `golden-2.json`. `python -m tests.test_golden` wrote both, and would write them anew; those of
format 1, which cannot be trained on, are older.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from minigen import Config, Run
from minigen.errors import MinigenError
from minigen.model import gradient, optimizer
from minigen.training.checkpoint import FORMAT, load

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / f"golden-{FORMAT}.safetensors"
OLD = DATA / "golden-1.safetensors"
TEXT = "The fox saw the grapes. The grapes were high. The fox said: they are sour.\n" * 3
SETTINGS = {
    "corpus.documents": "line",
    "corpus.validation_fraction": 0.2,
    "tokenizer.vocab_size": 260,
    "model.context_length": 2,
    "model.embedding_dim": 1,
    "training.steps": 30,
    "training.batch_size": 16,
    "optimizer.learning_rate": 0.1,
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup_steps": 4,
    "evaluation.every": 5,
    "sampling.every": 4,
    "sampling.max_new_tokens": 5,
}
SAVED_AT = 20
# What the settings above leave out: a batch that is no power of two, a linear decay, clipping; SGD,
# and more numbers for each token.
OTHERWISE = {
    "training.batch_size": 24,
    "optimizer.gradient_clip": 0.25,
    "optimizer.decay": "linear",
}
OTHERS = {
    "sgd": OTHERWISE | {"optimizer.name": "sgd", "optimizer.learning_rate": 2.0},
    "adamw": OTHERWISE | {"optimizer.learning_rate": 0.01, "model.embedding_dim": 64},
}


def trained() -> Run:
    """The run that the file was saved from."""
    run = Run(Config.load("fables", SETTINGS), text=TEXT)
    run.train(SAVED_AT)
    return run


def given(path: Path) -> dict[str, object]:
    """What a file gives: weights and text."""
    run = Run.load(path, text=TEXT)
    return {
        "fingerprint": run.fingerprint,
        "step": run.step,
        "streams": {name: stream.position for name, stream in run.streams.items()},
        "corpus_sha256": run.corpus_sha256,
        "loss": run.evaluate().hex(),
        "greedy": run.generate("The", max_new_tokens=12, temperature=0),
        "sampled": run.generate("The", max_new_tokens=12, min_new_tokens=12),
    }


def trained_on() -> str:
    """The fingerprint after the last step."""
    run = Run.load(GOLDEN, text=TEXT)
    run.train()
    return run.fingerprint


def trained_otherwise(settings: dict[str, object]) -> list[str]:
    """The losses and the fingerprint of a run with other settings."""
    run = Run(Config.load("fables", SETTINGS | settings), text=TEXT)
    losses = [record.loss.hex() for record in run.train()]
    return [*losses[::5], run.fingerprint]


def facts() -> dict[str, object]:
    return {
        **given(GOLDEN),
        "fingerprint after the last step": trained_on(),
        "trained otherwise": {name: trained_otherwise(OTHERS[name]) for name in OTHERS},
    }


def test_the_file_loads_writes_and_trains_on_as_it_did_when_it_was_written():
    found, expected = facts(), json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))
    assert found == expected


@pytest.mark.parametrize("passes", [np.inf, -np.inf], ids=["by contexts", "by table"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_settings_clip_every_gradient_and_give_the_same_both_ways(
    monkeypatch, name, passes
):
    norms, norm = [], optimizer.norm
    monkeypatch.setattr(optimizer, "norm", lambda x: norms.append(norm(x)) or norms[-1])
    monkeypatch.setattr(gradient, "PASSES", passes)
    expected = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))
    assert trained_otherwise(OTHERS[name]) == expected["trained otherwise"][name]
    assert len(norms) == SETTINGS["training.steps"]
    assert min(norms) > OTHERWISE["optimizer.gradient_clip"]


def test_training_again_gives_the_weights_and_moments_of_the_file():
    run, saved = trained(), load(GOLDEN)
    tensors = dict(run.model.parameters)
    for moment, flat in run.optimizer.moments.items():
        tensors |= {f"{moment}.{name}": view for name, view in run.model.views(flat).items()}
    assert tensors.keys() == saved.tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.tobytes() == saved.tensors[name].tobytes(), name


def test_saving_it_again_gives_the_same_file_but_for_keys_that_came_since(tmp_path):
    Run.load(GOLDEN).save(tmp_path / "again.safetensors")
    saved, again = vars(load(GOLDEN)), vars(load(tmp_path / "again.safetensors"))
    tensors, others = saved.pop("tensors"), again.pop("tensors")
    assert {name: x.tobytes() for name, x in tensors.items()} == {
        name: x.tobytes() for name, x in others.items()
    }
    configs = [Config.from_dict(one.pop("config")) for one in (saved, again)]
    assert (configs[0], saved) == (configs[1], again)


# Format 1: the gradient had another grid


def test_a_file_of_format_1_gives_the_weights_and_texts_that_it_gave():
    expected = json.loads(OLD.with_suffix(".json").read_text(encoding="utf-8"))
    del expected["fingerprint after the last step"]
    assert given(OLD) == expected


def test_a_file_of_format_1_is_read_by_every_command_that_does_not_train(minigen):
    fingerprint = json.loads(OLD.with_suffix(".json").read_text(encoding="utf-8"))["fingerprint"]
    assert fingerprint in minigen("info", str(OLD)).out
    for command in ("generate", "score", "next"):
        assert minigen(command, str(OLD), "The").out


def test_saving_a_file_of_format_1_again_keeps_its_format_and_every_number(tmp_path):
    Run.load(OLD).save(tmp_path / "again.safetensors")
    old, again = load(OLD), load(tmp_path / "again.safetensors")
    assert (again.format, again.step, again.streams) == (1, old.step, old.streams)
    assert again.tensors.keys() == old.tensors.keys()
    for name, tensor in old.tensors.items():
        assert again.tensors[name].tobytes() == tensor.tobytes(), name


REFUSAL = (
    "is of format 1, whose gradient was rounded otherwise than that of format 2, so training would "
    "not give its weights: train its config anew, or use the version of minigen that wrote it"
)


@pytest.mark.parametrize("steps", [None, 0, 1])
def test_training_on_from_format_1_is_refused(steps):
    with pytest.raises(MinigenError) as raised:
        Run.load(OLD, text=TEXT).train(steps)
    assert str(raised.value) == f"{OLD} {REFUSAL}"


def test_verifying_a_file_of_format_1_is_refused(minigen):
    found = minigen("verify", str(OLD))
    assert (found.status, found.err) == (1, f"Error: {OLD} {REFUSAL}\n")


def test_resuming_a_folder_of_format_1_is_refused_and_leaves_it_as_it_is(minigen, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    config = Config.load("fables", SETTINGS | {"corpus.text": [str(tmp_path / "text.txt")]})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    (folder / "metrics.jsonl").write_bytes(b"")
    checkpoint = folder / "step-000020.safetensors"
    checkpoint.write_bytes(OLD.read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = minigen("train", "--resume", "--out", str(folder))
    assert (said.status, said.err) == (1, f"Error: {checkpoint} {REFUSAL}\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", [path.name for path in (GOLDEN, OLD)])
def test_the_files_are_small(name):
    for path in (DATA / name, (DATA / name).with_suffix(".json")):
        assert path.stat().st_size < 40_000


if __name__ == "__main__":
    trained().save(GOLDEN)
    GOLDEN.with_suffix(".json").write_text(
        json.dumps(facts(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
