"""What several tests share: a small trained run, and the command line in this process."""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from minigen import MinigenError, OptionError, cli
from minigen.signals import STOP_SIGNALS

# Of all property tests: a busy machine is no fault, and the examples are the same each time.
# `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("minigen", deadline=None, derandomize=True)
settings.load_profile("minigen")

not_as_root = pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() == 0,
    reason="root may read and write everything: needs to run as another user",
)

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup a hang-up: what
# they start would ignore it, too.
for _number in STOP_SIGNALS:
    if signal.getsignal(_number) == signal.SIG_IGN:
        _is_interrupt = _number == signal.SIGINT
        signal.signal(_number, signal.default_int_handler if _is_interrupt else signal.SIG_DFL)

_raises = pytest.raises


@contextmanager
def _with_its_status(expected: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
    """Hold apart what is exit status 1 and what is 2, though an OptionError is a MinigenError."""
    with _raises(expected, *arguments, **options) as caught:
        yield caught
    is_usage = isinstance(caught.value, OptionError)
    assert expected is not MinigenError or not is_usage, "expected MinigenError, got OptionError"


pytest.raises = _with_its_status  # type: ignore[assignment]

# Seconds until a process hangs: many, since a busy machine is no fault; fewer for `make mutants`.
PATIENCE = float(os.environ.get("PATIENCE", "600"))

TINY = {  # a run of a second: bytes only, two of context
    "tokenizer.vocab_size": 257,
    "model.context_length": 2,
    "model.embedding_dim": 4,
    "training.steps": 6,
    "training.batch_size": 16,
    "optimizer.warmup_steps": 2,
    "evaluation.every": 3,
    "sampling.every": 2,
    "sampling.max_new_tokens": 8,
    "checkpoint.every": 4,
}
TINY_SETTINGS = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]


class Result(NamedTuple):
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def _compiling_is_told() -> None:
    """Let the first command of a process say no more than the others, where nothing is cached."""
    with suppress(ImportError):
        numba_cache = importlib.import_module("minigen.model.numba_cache")
        numba_cache._announce()


@pytest.fixture
def minigen(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    _compiling_is_told: None,
) -> Callable[..., Result]:
    """Run a command in a fresh folder, as `minigen("train", "fables")`."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        status = cli.run(list(arguments))
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny finished run on the embedded text; not to be changed."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    assert cli.run(["train", "fables", *TINY_SETTINGS, "--out", str(folder)]) == 0
    return folder
