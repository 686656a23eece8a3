"""What both engines share: threads, blocks that stay in cache, arrays that are used again."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from minigen.exact.arithmetic import Floats

GRAIN = 125_000  # nanoseconds of work below which a further thread costs more than it saves
_LENT = 6  # arrays of ``recycled``: weights and two moments, before a step and after it


class _Own(threading.local):
    """A thread's arrays that are used again, and the threads that help it, and none but it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        nothing = np.empty(0)
        self.arrays: dict[str, Floats] = {}
        self.lent = deque([(weakref.ref(nothing), nothing)] * _LENT, maxlen=_LENT)
        self.helpers = ThreadPoolExecutor(os.cpu_count())  # each starts when it is needed


_own = _Own()


@cache
def resources() -> tuple[int, Any]:
    """Return the number of threads (as many as BLAS was allowed), and BLAS."""
    blas = ThreadpoolController().select(user_api="blas")
    threads = max((library["num_threads"] for library in blas.info()), default=os.cpu_count() or 1)
    return threads, blas


@lru_cache(maxsize=1)  # the same count once more is no work
def use_threads(count: int) -> None:
    """Hold this process at so many threads, or fewer, where others compute on the same cores."""
    most = _most_threads()
    resources.cache_clear()  # scipy may have brought a BLAS of its own since
    resources()[1].limit(limits=max(1, min(count, most)))
    resources.cache_clear()


@cache
def _most_threads() -> int:
    return resources()[0]  # as many as were allowed at the start


def cores() -> set[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=resources.cache_clear)
    os.register_at_fork(after_in_child=_own.forget)  # a forked process has no threads


def _equal(size: int, count: int) -> list[slice]:
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


def shares(size: int, nanoseconds: int = 1) -> list[slice]:
    """Cut range(size) into equal parts, a thread each; an item takes about so long."""
    return _equal(size, max(1, min(resources()[0], size, size * nanoseconds // GRAIN)))


def blocks(size: int, row_size: int = 1, block_size: int = 1 << 14) -> list[slice]:
    """Cut range(size), of rows, into equal parts of about so many elements; of none, one part."""
    return _equal(size, max(1, min(size, -(-size * row_size // block_size))))


def in_parallel(work: Callable[[slice], Any], parts: list[slice]) -> list[Any]:
    """[work(part), …], a thread each."""
    try:
        others = [_own.helpers.submit(work, part) for part in parts[1:]]
        return [work(parts[0]), *(other.result() for other in others)]
    except BaseException:
        _own.forget()  # a helper may still be writing into arrays that are used again
        raise


def scratch(name: str, *shape: int) -> Floats:
    """Return this thread's array of that name, its content whatever was left there.

    Fresh arrays would cost a quarter of a step's time, since the system maps each page anew.
    """
    flat = _own.arrays.get(name)
    if flat is None or flat.size < prod(shape):
        flat = _own.arrays[name] = np.empty(prod(shape))
    return flat[: prod(shape)].reshape(shape)


def recycled(size: int) -> Floats:
    """Return an array (size,) for as long as it is held; its content is whatever was left there.

    As ``scratch``, but its memory is used again only when nothing refers to it or a view of it.
    """
    holder, memory = _own.lent[0]
    memory = memory if memory.size == size and holder() is None else np.empty(size)
    array = np.frombuffer(memory.data)  # an array of its own, which all views of it hold
    _own.lent.append((weakref.ref(array), memory))  # the first one goes
    return array
