"""What may change when a run goes on: what does not decide the weights, by one list, for all."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from minigen import Config, MinigenError, Run, verify
from minigen.proof.difference import compare
from minigen.text.corpus import FABLES
from minigen.training import checkpoint
from minigen.training.config import deciding_differences
from minigen.training.folder import RunFolder
from minigen.training.keys import KEYS

STEPS = 6
TEXT = "The fox saw the grapes. The grapes were high. The fox said: they are sour.\n" * 4
CONFIG = Config.load(
    "fables",
    {
        "training.steps": STEPS,
        "training.batch_size": 8,
        "corpus.documents": "line",
        "tokenizer.vocab_size": 257,
        "model.context_length": 2,
        "model.embedding_dim": 3,
        "optimizer.warmup_steps": 2,
        "evaluation.every": 3,
        "sampling.every": 2,
        "sampling.max_new_tokens": 6,
        "checkpoint.every": 2,
    },
)
OTHER = {  # another value of each key that decides the weights
    "run.seed": 1,
    "corpus.documents": "file",
    "corpus.validation_fraction": 0.2,
    "tokenizer.vocab_size": 300,
    "model.context_length": 3,
    "model.embedding_dim": 4,
    "training.steps": 7,
    "training.batch_size": 9,
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.03,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.momentum": 0.5,
    "optimizer.weight_decay": 0.2,
    "optimizer.gradient_clip": 0.0,
    "optimizer.warmup_steps": 3,
    "optimizer.decay": "linear",
}
FREE = {
    "training.micro_batches": 4,
    "evaluation.every": 1,
    "sampling.every": 1,
    "sampling.prompt": "A fox",
    "sampling.max_new_tokens": 3,
    "sampling.top_k": 5,
    "checkpoint.every": 1,
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def half(text, tmp_path):
    """A run folder that was left after step 4 of 6, with its config."""
    config = CONFIG.override({"corpus.text": [str(text)]})
    folder = RunFolder.create(tmp_path / "run", Run(config))
    for record in folder.steps():
        if record.step == 4:
            break
    return folder.path, config


def test_the_keys_of_this_file_are_all_there_are():
    deciding = {key for key, entry in KEYS.items() if entry.decides_weights}
    assert deciding == OTHER.keys() | {"corpus.text"}
    assert not deciding & FREE.keys()


@pytest.mark.parametrize("key", OTHER)
def test_what_decides_the_weights_is_refused_by_name_in_the_same_words_everywhere(key, half):
    """Field report 62: before anything is trained, and nothing in the folder changes."""
    path, config = half
    other = config.override({key: OTHER[key]})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    messages = []
    for go_on in (
        lambda: Run.load(path, config=other),
        lambda: Run.load(path, config=other, text=TEXT),
        lambda: RunFolder.resume(path, other),
    ):
        with pytest.raises(MinigenError) as caught:
            go_on()
        messages.append(str(caught.value))
    assert messages[0].startswith(f"{key} cannot change in a run that goes on (it was ")
    assert len(set(messages)) == 1
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [name for name, _, _ in deciding_differences(config, other)] == [key]


def test_what_does_not_decide_them_may_change_and_every_file_of_the_run_is_verified(half, text):
    """Field reports 60 and 61: the bits are those of a run whose config never changed."""
    path, config = half
    folder = RunFolder.resume(path, config.override(FREE))
    records = list(folder.steps())
    alone = Run(config)
    assert [r.loss for r in alone.train()][4:] == [r.loss for r in records]
    assert folder.run.fingerprint == alone.fingerprint
    files = checkpoint.by_step(path)
    assert sorted(files) == [0, 2, 4, 5, 6]
    for file in (path, *files.values()):
        assert verify(file) == []


def test_steps_may_be_raised_and_never_lowered_where_the_rate_stays(half, text, tmp_path):
    config = half[1].override({"optimizer.decay": "constant"})
    path = tmp_path / "constant"
    for _ in RunFolder.create(path, Run(config)).steps():
        pass
    with pytest.raises(MinigenError, match=r"training.steps cannot change .*it was 6, got 5\)"):
        Run.load(path, config=config.override({"training.steps": 5}))
    longer = config.override({"training.steps": 8})
    folder = RunFolder.resume(path, longer)
    assert [record.step for record in folder.steps()] == [7, 8]
    whole = Run(longer)
    whole.train()
    assert folder.run.fingerprint == whole.fingerprint
    for file in (path, *checkpoint.by_step(path).values()):
        assert verify(file) == []


def test_a_run_saved_before_a_key_existed_goes_on_with_what_it_meant(text, tmp_path):
    """Field report 63: with a clip that was not there, and not with the default of today."""
    config = CONFIG.override({"corpus.text": [str(text)], "optimizer.gradient_clip": 0.0})
    path = tmp_path / "run"
    folder = RunFolder.create(path, Run(config))
    saved = checkpoint.load(folder.latest)
    del saved.config["optimizer"]["gradient_clip"], saved.config["sampling"]["top_n_sigma"]
    checkpoint.save(folder.latest, saved)
    lines = (path / "config.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("gradient_clip")]
    assert len(kept) == len(lines) - 1
    (path / "config.toml").write_text("".join(kept), encoding="utf-8")
    whole = Run(config)
    whole.train()
    assert verify(path) == []
    alone = Run.load(path)
    alone.train()
    for _ in RunFolder.resume(path, Config.of_run(path)).steps():
        pass
    assert Run.load(path).fingerprint == alone.fingerprint == whole.fingerprint
    assert verify(path) == []


def test_a_text_given_again_keeps_the_name_that_it_had(half, tmp_path):
    path, _ = half
    run = Run.load(path, text=TEXT, config=CONFIG)  # whose corpus.text is "fables"
    run.train()
    run.save(tmp_path / "end.safetensors")
    assert checkpoint.load(tmp_path / "end.safetensors").config["corpus"]["text"] == "external"


def test_the_embedded_text_given_again_as_a_file_keeps_its_name(tmp_path):
    config = CONFIG.override({"corpus.text": "fables", "training.steps": 2})
    for _ in RunFolder.create(tmp_path / "run", Run(config)).steps():
        break
    copied = tmp_path / "copy.txt"
    copied.write_bytes(FABLES.read_bytes())
    folder = RunFolder.resume(tmp_path / "run", config.override({"corpus.text": [str(copied)]}))
    for _ in folder.steps():
        pass
    assert Config.of_run(tmp_path / "run").corpus.text == "fables"
    assert checkpoint.load(folder.latest).config["corpus"]["text"] == "fables"
    assert verify(tmp_path / "run") == []


def test_a_run_on_a_text_of_its_own_does_not_become_one_on_the_embedded(half):
    path, config = half
    with pytest.raises(MinigenError, match=r"corpus\.text cannot change in a run that goes on"):
        RunFolder.resume(path, config.override({"corpus.text": "fables"}))


@pytest.fixture
def parts(tmp_path):
    """A config whose text is two files."""
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(f"{path.name}\n{TEXT}")
    return CONFIG.override({"corpus.text": [*map(str, paths)], "optimizer.decay": "constant"})


def test_a_text_of_the_digests_of_two_others_is_refused_in_their_place(parts, tmp_path):
    """Field report 84: in either place, by resume, verify and diff."""
    digests = b"".join(
        hashlib.sha256(Path(file).read_bytes()).digest() for file in parts.corpus.text
    )
    (tmp_path / "digests").write_bytes(digests)
    forged = parts.override({"corpus.text": [str(tmp_path / "digests")]})
    paths = [tmp_path / "honest", tmp_path / "forged"]
    for path, config in zip(paths, (parts, forged), strict=True):
        for _ in RunFolder.create(path, Run(config)).steps():
            break
    for path, other in zip(paths, (forged, parts), strict=True):
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(MinigenError, match="not the one this run was trained on"):
            RunFolder.resume(path, other)
        with pytest.raises(MinigenError, match=r"is not the one that .* was trained on"):
            verify(path, other.corpus.text)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert compare(*paths).differences[0].what == "text (its SHA-256)"


def test_a_run_from_before_files_were_counted_goes_on(parts, tmp_path):
    path = tmp_path / "run"
    folder = RunFolder.create(path, Run(parts))
    saved = checkpoint.load(folder.latest)
    assert (saved.corpus_files, saved.corpus_sha256[64:]) == (2, "-2")
    old = replace(saved, corpus_sha256=saved.corpus_sha256[:64], corpus_files=None)
    checkpoint.save(folder.latest, old)
    before = checkpoint.load(folder.latest)
    assert (before.corpus_files, before.corpus_sha256) == (None, saved.corpus_sha256[:64])
    for _ in RunFolder.resume(path, parts).steps():
        pass
    assert verify(path) == []
    assert checkpoint.load(checkpoint.locate(path)).corpus_sha256 == saved.corpus_sha256
    whole = RunFolder.create(tmp_path / "whole", Run(parts))
    for _ in whole.steps():
        pass
    assert compare(path, tmp_path / "whole").same
