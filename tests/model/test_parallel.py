"""Threads and arrays that are used again: how many, in which order, and none of another process."""

import os
import signal
import warnings
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from minigen.model import parallel
from minigen.model.parallel import blocks, cores, in_parallel, recycled, scratch, shares


class Blas:
    """Libraries as threadpoolctl lists them, each with a number of threads that can be limited."""

    def __init__(self, *threads: int) -> None:
        self.threads, self.asked = list(threads), list[int]()

    def select(self, *, user_api: str) -> "Blas":
        assert user_api == "blas"
        return self

    def info(self) -> list[dict[str, int]]:
        return [{"num_threads": threads} for threads in self.threads]

    def limit(self, *, limits: int) -> None:
        self.asked.append(limits)
        self.threads = [limits for _ in self.threads]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """Let this process have these libraries, as if it had just started."""

    def start(blas: Blas) -> None:
        monkeypatch.setattr(parallel, "ThreadpoolController", lambda: blas)
        for name in ("resources", "_most_threads"):
            monkeypatch.setattr(parallel, name, cache(getattr(parallel, name).__wrapped__))

    parallel.use_threads.cache_clear()
    yield start
    parallel.use_threads.cache_clear()


@pytest.mark.parametrize(
    ("threads", "count", "most"), [([2, 4, 3], 8, 4), ([], 8, 8), ([], None, 1)]
)
def test_there_are_as_many_threads_as_blas_has_or_else_cores(
    use, monkeypatch, threads, count, most
):
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    use(Blas(*threads))
    assert parallel.resources()[0] == most


def test_a_process_is_held_at_a_number_of_threads_from_1_to_what_it_had_at_its_start(use):
    blas = Blas(4)
    use(blas)
    for count in (2, 2, 9, 2, 0, 1):  # the same once more is no work
        parallel.use_threads(count)
        assert parallel.resources()[0] == max(1, min(count, 4))
    assert blas.asked == [2, 4, 2, 1, 1]


def test_a_blas_that_was_loaded_since_is_held_at_the_same_number(use, monkeypatch):
    use(Blas(4))
    assert parallel.resources()[0] == 4
    both = Blas(4, 8)
    monkeypatch.setattr(parallel, "ThreadpoolController", lambda: both)
    parallel.use_threads(9)
    assert both.threads == [4, 4]


def test_cores_are_those_of_this_process_or_else_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3 + process, 5}, raising=False)
    assert cores() == {3, 5}
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, numbers in ((3, {0, 1, 2}), (None, {0})):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert cores() == numbers


def test_work_is_shared_once_there_is_a_grain_of_it_for_each_thread(use):
    use(Blas(3))
    grain = parallel.GRAIN
    for size, nanoseconds, parts in (
        (2 * grain - 1, {}, 1),  # by default a nanosecond an item
        (2 * grain, {}, 2),
        (9 * grain, {}, 3),
        (2, (grain,), 2),
        (0, (grain,), 1),
    ):
        found = shares(size, *nanoseconds)
        assert len(found) == parts
        assert [i for part in found for i in (part.start, part.stop)][1:-1:2] == [
            part.start for part in found[1:]
        ]
        assert (found[0].start, found[-1].stop) == (0, size)


@pytest.mark.parametrize(
    ("of", "ends"),
    [
        ((7, 1, 4), [3, 7]),
        ((7, 2, 9), [3, 7]),
        ((9, 1, 4), [3, 6, 9]),
        ((2, 9, 4), [1, 2]),  # a row at least
        ((16385,), [8192, 16385]),
        ((0,), [0]),
    ],
)
def test_rows_are_cut_into_equal_blocks_of_about_so_many_elements(of, ends):
    assert blocks(*of) == [slice(*pair) for pair in pairwise([0, *ends])]


def test_memory_that_nobody_holds_is_used_again_after_five_other_arrays():
    places = [recycled(1000).ctypes.data for _ in range(18)]
    assert places[6:] == places[:-6]
    assert len(set(places)) == 6
    assert recycled(7).size == 7


def test_arrays_are_used_again_by_name_but_not_after_a_failure_that_is_raised():
    array = scratch("mine", 3, 4)
    assert array.shape == (3, 4)
    assert np.shares_memory(scratch("mine", 4, 3), array)
    assert not np.shares_memory(scratch("other", 3, 4), array)
    with pytest.raises(ZeroDivisionError):  # a helper may still be writing
        in_parallel(lambda part: 1 // part.start, [slice(1, 2), slice(0, 1)])
    assert not np.shares_memory(scratch("mine", 3, 4), array)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks processes")
def test_a_forked_process_starts_helpers_of_its_own_and_asks_for_its_own_threads():
    parts = [slice(0, 1), slice(1, 2)]
    assert in_parallel(lambda part: part, parts) == parts
    scratch("mine", 3)
    parallel.resources()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads is what is tried
        child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # it would wait for threads that it has not
            fresh = not parallel._own.arrays and not parallel.resources.cache_info().currsize
            os._exit(0 if fresh and in_parallel(lambda part: part, parts) == parts else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
