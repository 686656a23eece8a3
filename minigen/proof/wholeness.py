"""The experiments on a run as one thing: interrupted, copied, and shared between threads."""

import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

from minigen.exact.streams import Stream
from minigen.proof.experiments import PROMPTS, own_streams, texts
from minigen.proof.laboratory import TOKENS, Claim, Laboratory, Step, claim, difference, state
from minigen.training.run import Run, StepRecord

_PACKAGE = str(Path(__file__).parents[1])
_THREADS = 8
_GLANCE = 0.1  # seconds between two looks at a thread that may have failed
_TURN = 1e-6  # seconds after which a thread that can run gets its turn


# ── Interruptions ────────────────────────────────────────────────────────────────────────────────


def _take_step(run: Run, moment: int | None = None) -> int:
    """Take a step, interrupted before statement ``moment``; return how many it came to.

    Counted are the statements of the package that this thread comes to.
    """
    met = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal met
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            met += 1
            if met - 1 == moment:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run.train(1)
    finally:
        sys.settrace(before)
    return met


class StepsInPlace(Run):
    """The mistake: a step that changes the run bit by bit."""

    def _take_step(self) -> StepRecord:
        return self._advance()


def interrupt(lab: Laboratory) -> Claim:
    """Show that a step that is interrupted has happened or not, and that training goes on so."""
    probe = lab.run()
    statements = min(_take_step(probe), _take_step(probe))  # the first one fills a cache
    whole, ends = lab.run(), []
    for _ in whole.steps():
        ends.append((whole.streams["optimizer"].position, state(whole)))

    def interrupted(run: Run) -> tuple[str, int]:
        """Interrupt every step once, each in a later part of it; say which ends otherwise."""
        stream, count = Stream(lab.config.run.seed, "interrupt"), 0
        for number in range(lab.steps):
            drawn = int(stream.integers(1, statements)[0])
            moment = (number * statements + drawn) // lab.steps
            try:
                _take_step(run, moment)
            except KeyboardInterrupt:
                count += 1
            if run.step == number:
                run.train(1)
            end = run.streams["optimizer"].position, state(run)
            if run.step != number + 1 or end != ends[number]:
                return f"step {number + 1} interrupted before statement {moment}: other", count
        return "", count

    found, count = interrupted(lab.run())
    return claim(
        "interrupt",
        f"{count} of {lab.steps} steps interrupted, each before another of {statements} "
        "statements, and trained on: same batches, weights and moments as without",
        {"trained on": found},
        "a step that changes the run in place",
        interrupted(lab.run(kind=StepsInPlace))[0],
        untested="" if count else "no step was interrupted",
    )


# ── Copies ───────────────────────────────────────────────────────────────────────────────────────

COPIES: dict[str, Callable[[Run], Run]] = {
    "copy": copy,
    "deepcopy": deepcopy,
    "pickle": lambda run: pickle.loads(pickle.dumps(run)),
}


def copies(lab: Laboratory) -> Claim:
    """Show that a copy of a run goes on as the run does, and that neither changes the other."""
    half = lab.steps // 2
    run = lab.run()
    lab.train(run, half)
    twins = {name: make(run) for name, make in COPIES.items()}
    forgetful = deepcopy(run)
    forgetful.streams["optimizer"].position = 0
    before = state(run)
    traces = {name: lab.train(twin) for name, twin in twins.items()}
    differences = {"the original": "" if state(run) == before else "changed by its copies"}
    trace, end = lab.train(run), lab.stored(run)
    for name, twin in twins.items():
        found = difference(trace, traces[name], first_step=half + 1)
        differences[name] = found or ("" if lab.stored(twin) == end else "other file")
    return claim(
        "copy",
        f"copied at step {half} ({', '.join(COPIES)}), trained to step {lab.steps}: same batches, "
        "losses, weights and file as the original, which they leave as it is",
        differences,
        "a copy whose stream starts anew",
        difference(trace, lab.train(forgetful), first_step=half + 1),
    )


# ── Threads ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _taking_turns() -> Iterator[ThreadPoolExecutor]:
    """Give threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            yield threads
    finally:
        sys.setswitchinterval(interval)


def threads(lab: Laboratory) -> Claim:
    """Show that threads that share a model, or a run that trains, get what each would get alone."""
    run = lab.run()
    lab.train(run)

    seeds = range(2 * _THREADS)
    alone = [texts(run, own_streams(seed)) for seed in seeds]
    one, shared = copy(run), own_streams(0)
    one.model = deepcopy(run.model)  # its table is empty again, to be filled by all
    with _taking_turns() as pool:
        together = list(pool.map(lambda seed: texts(one, own_streams(seed)), seeds))
        of_one = list(pool.map(lambda _: texts(one, shared), seeds))
    never, (trace, asked) = lab.train(lab.run()), _asked_while_training(lab)
    return claim(
        "threads",
        f"{len(seeds) * len(PROMPTS)} texts by {_THREADS} threads from one model: the same as one "
        f"after the other; {lab.steps} steps with text asked for in another thread: same batches, "
        "losses and weights",
        {
            "together": "" if together == alone else "other texts",
            "while training": asked or difference(never, trace),
        },
        "threads that share their streams, too",
        of_one != [alone[0]] * len(seeds),
    )


def _asked_while_training(lab: Laboratory) -> tuple[list[Step], str]:
    """Train while another thread asks for text; return what happened, and what that thread met."""
    run, answered, done = lab.run(), Event(), Event()

    def ask() -> None:
        while not done.is_set():
            run.generate(PROMPTS[0], max_new_tokens=TOKENS, min_new_tokens=TOKENS)
            answered.set()

    def wait(_run: Run) -> None:
        for _ in range(2):  # the first text may have begun before the step had ended
            answered.clear()
            while not (answered.wait(_GLANCE) or asking.done()):
                pass

    with _taking_turns() as pool:
        asking = pool.submit(ask)
        try:
            trace = lab.train(run, after_each=wait)
        finally:
            done.set()
        error = asking.exception()
    return trace, f"the other thread: {error!r}" if error else ""
