"""The demonstration: each line that it says is read from both runs, and changes where they do."""

import io
from collections.abc import Callable

import numpy as np
import pytest

from minigen.proof.demonstration import Demonstration
from minigen.training.config import Config
from minigen.training.run import Run
from tests.conftest import TINY, Result


@pytest.fixture
def demonstration() -> Demonstration:
    return Demonstration(Config.load(overrides=TINY))


Undo = Callable[[], object]


def lines(
    demonstration: Demonstration, after_step: Callable[[Run, int], Undo | None] | None = None
) -> list[str]:
    """Train both, doing something to the twin after each step; return the lines that are false."""
    for _ in demonstration.watch(demonstration.run, demonstration.run.steps()):
        pass
    for record in demonstration.twin.steps():
        undo = after_step(demonstration.twin, record.step) if after_step else None
        for _ in demonstration.watch(demonstration.twin, iter([record])):
            pass
        if undo:
            undo()
    return [finding.text for finding in demonstration.findings() if not finding.holds]


def test_two_runs_of_one_config_have_all_in_common_but_the_samples(
    demonstration: Demonstration,
) -> None:
    assert lines(demonstration) == []
    first, *same, last = [finding.text for finding in demonstration.findings()]
    drawn = demonstration.run.streams["inference"].position
    assert drawn > 0
    assert first == f"Random numbers drawn for 3 samples: {drawn} by the run, 0 by its twin."
    assert same == [f"Same {what} at every step: yes" for what in ("batches", "losses", "weights")]
    assert last == f"Fingerprint: {demonstration.run.fingerprint}"


def test_a_twin_that_draws_is_said_to(demonstration: Demonstration) -> None:
    def draw(run: Run, step: int) -> None:
        if step == 2:
            run.generate("a", max_new_tokens=1)

    (line,) = lines(demonstration, draw)
    assert line.endswith(" by the run, 1 by its twin.")


def test_both_read_a_text_that_can_be_read_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"to be or not to be")))
    of_stdin = Demonstration(Config.load(overrides={**TINY, "corpus.text": ["-"]}))
    assert lines(of_stdin) == []
    assert of_stdin.run.config.corpus.text == ("-",)  # which the run folder names


def test_a_run_that_is_never_asked_shows_nothing() -> None:
    silent = Demonstration(Config.load(overrides={**TINY, "sampling.every": 0}))
    (line,) = lines(silent)
    assert line == "Random numbers drawn for 0 samples: 0 by the run, 0 by its twin."


def test_a_single_weight_that_is_other_for_a_single_step_is_seen(
    demonstration: Demonstration,
) -> None:
    def disturb(run: Run, step: int) -> Callable[[], None] | None:
        bias = run.model.parameters["b"]
        before = float(bias[0])
        if step == 3:
            bias[0] = np.nextafter(before, 1.0)
        return lambda: bias.__setitem__(0, before)  # before the next step begins

    assert lines(demonstration, disturb) == [
        "Same weights at every step: NO, other weights from step 3 on"
    ]


def test_another_batch_is_seen_with_all_that_follows_from_it(demonstration: Demonstration) -> None:
    def skip(run: Run, step: int) -> None:
        if step == 4:
            run.streams["optimizer"].word()

    *same, fingerprint = lines(demonstration, skip)
    assert same == [
        "Same batches at every step: NO, other batches from step 5 on",
        "Same losses at every step: NO, other losses from step 5 on",
        "Same weights at every step: NO, other weights from step 5 on",
    ]
    assert f", of the twin: {demonstration.twin.fingerprint}" in fingerprint


def test_the_demo_fails_where_a_line_is_false(minigen: Callable[..., Result]) -> None:
    settings = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    told = "no text will be asked for on the way, so this shows nothing"
    for every, samples in ((0, 0), (1, 6), (6, 1), (7, 0)):  # of 6 steps
        done = minigen("demo", *settings, "--set", f"sampling.every={every}")
        assert (done.status, done.err.startswith(told)) == ((0, False) if samples else (1, True))
        assert f"for {samples} samples" in done.out
