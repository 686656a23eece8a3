"""A checkpoint that an earlier version wrote loads, writes and trains on as it did then.

`tests/data/golden.safetensors` stays as it is for as long as its format is read; what it gives is
in `golden.json`. `python -m tests.test_golden` wrote both, and would write them anew.
"""

import json
from pathlib import Path

import pytest

from minigen import Config, Run
from minigen.training.checkpoint import load

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden.safetensors"
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
    "optimizer.warmup_steps": 4,
    "evaluation.every": 5,
    "sampling.every": 4,
    "sampling.max_new_tokens": 5,
}
SAVED_AT = 20


def trained() -> Run:
    """The run that the file was saved from."""
    run = Run(Config.load("fables", SETTINGS), text=TEXT)
    run.train(SAVED_AT)
    return run


def facts() -> dict[str, object]:
    """What the file gives: weights, text, and a run that goes on."""
    run = Run.load(GOLDEN, text=TEXT)
    found = {
        "fingerprint": run.fingerprint,
        "step": run.step,
        "streams": {name: stream.position for name, stream in run.streams.items()},
        "corpus_sha256": run.corpus_sha256,
        "loss": run.evaluate().hex(),
        "greedy": run.generate("The", max_new_tokens=12, temperature=0),
        "sampled": run.generate("The", max_new_tokens=12, min_new_tokens=12),
    }
    run.train()
    return {**found, "fingerprint after the last step": run.fingerprint}


def test_the_file_loads_writes_and_trains_on_as_it_did_when_it_was_written():
    assert facts() == json.loads((DATA / "golden.json").read_text(encoding="utf-8"))


def test_training_again_gives_the_weights_and_moments_of_the_file():
    run, saved = trained(), load(GOLDEN)
    tensors = dict(run.model.parameters)
    for moment, flat in run.optimizer.moments.items():
        tensors |= {f"{moment}.{name}": view for name, view in run.model.views(flat).items()}
    assert tensors.keys() == saved.tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.tobytes() == saved.tensors[name].tobytes(), name


def test_saving_it_again_gives_the_same_bytes(tmp_path):
    """As long as the format is the one that it was written in."""
    Run.load(GOLDEN).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == GOLDEN.read_bytes()


@pytest.mark.parametrize("name", ["golden.safetensors", "golden.json"])
def test_the_files_are_small(name):
    assert (DATA / name).stat().st_size < 40_000


if __name__ == "__main__":
    trained().save(GOLDEN)
    (DATA / "golden.json").write_text(
        json.dumps(facts(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
