"""A pool of processes runs tasks that have nothing to do with each other."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

from minigen.model.parallel import cores, use_threads
from minigen.signals import heard_by, let_pass
from minigen.training.workers import Workers

_AGAIN = 0.2  # seconds until a process that goes on is asked to end once more
_life = ExitStack()  # of a process of the pool


def helpers(workers: Workers) -> int:
    """How many tasks of a pool can run beside this process: a worker each, or a core each."""
    return (workers.size if workers.size > 1 else len(cores())) - 1


@contextmanager
def pool(
    workers: Workers,
    tasks: int,
    *,
    joins: bool = False,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Executor | None]:
    """Give what runs so many tasks: the other workers, or else a process a core.

    ``joins``: the caller runs some of them meanwhile, on a core of its own, with its share of the
    threads. An interruption is passed on to the processes; workers have it from mpiexec. A worker
    that is given None has done its share. Each process lives ``within`` such a context.
    """
    if workers.size > 1:
        from mpi4py.futures import MPICommExecutor

        executor: Any
        with (
            heard_by(let_pass) if workers.rank > 0 else nullcontext(),  # between two tasks
            MPICommExecutor(workers.communicator, root=0) as executor,
        ):
            yield executor
        return
    processes = max(1, min(tasks, len(cores())) - joins)
    threads = len(cores()) // (processes + joins)
    if joins:
        use_threads(threads)
    others = active_children()  # of whoever called: they are not ours to end
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_helper, (threads, within)) as executor:
        try:
            yield executor
        finally:
            try:
                # Again and again: one that ends its task first may wait for a lock of the queue
                # that another, which had no task, died with.
                while ours := set(active_children()).difference(others):
                    for process in ours:
                        process.terminate()
                    wait([process.sentinel for process in ours], _AGAIN)
            finally:  # a second Ctrl-C does not wait
                for process in set(active_children()).difference(others):
                    process.kill()
                use_threads(len(cores()))


def _start_helper(threads: int, within: Callable[[], AbstractContextManager[object]]) -> None:
    """Prepare a process of the pool; apart from the terminal, whose Ctrl-C is passed on once."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_threads(threads)
    _life.enter_context(within())


def _end_with_parent() -> None:
    """End this process where the one that started it was killed, and could not say so."""
    parent: Any = parent_process()
    wait([parent.sentinel])
    os._exit(1)
