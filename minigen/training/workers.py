"""Workers are processes that share each batch: its statistics add up exactly, so all stay equal.

Every worker calls the same methods in the same order. One process alone is the trivial case.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, TypeVar, cast

import numpy as np

from minigen.errors import MinigenError, OptionError, shown
from minigen.exact.arithmetic import Integers
from minigen.model.gradient import Statistics
from minigen.model.parallel import resources
from minigen.signals import heard_by, let_pass

T = TypeVar("T")

# What starts processes tells them their number in one of these: Open MPI, MPICH and its kin, Slurm.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_PATIENCE = 5.0  # seconds between the first and the last worker that meet the same error
_HALF = 2**32  # a loss is sent as two halves, since it may pass 2^53


class Workers:
    """One process alone: worker 0 of 1.

    ``asked_to_stop`` is for a signal handler to set; ``is_stopping`` tells what all agreed on.
    """

    rank, size = 0, 1

    def __init__(self) -> None:
        self.asked_to_stop = False
        self._holds_back = False

    def share(self, indices: Integers) -> Integers:
        """Return the part of a batch (N,) that is this worker's: (n,), perhaps none."""
        start, stop = (len(indices) * rank // self.size for rank in (self.rank, self.rank + 1))
        return indices[start:stop]

    def total(self, work: Callable[[], Statistics], parameters: int) -> Statistics:
        """Sum over all workers what ``work`` returns for their shares of a step: the whole step.

        ``parameters`` is the length of its vector. An error of one worker is raised by all, here
        and below.
        """
        return work()

    def is_stopping(self) -> bool:
        """Whether a worker had been asked to stop when the last total was taken."""
        return self.asked_to_stop

    def each(self, work: Callable[[], T]) -> T:
        """Let every worker do the same, the first of each machine before the others."""
        return work()

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first worker do something, and return its result to all."""
        return work()

    def agree(self, what: str, value: str) -> None:
        """Raise MinigenError unless all workers have the same value."""

    def helpers(self) -> int:
        """How many tasks of a pool can run beside this process: a core each."""
        return len(_cores()) - 1

    @contextmanager
    def pool(self, tasks: int, *, joins: bool = False) -> Iterator[Executor | None]:
        """Give what runs tasks that have nothing to do with each other: here, a process a core.

        ``joins``: the caller runs some of them meanwhile, on a core of its own, held at its share
        of the threads until it is to ``spread``. An interruption is passed on to them. A worker
        that is given None has done its share.
        """
        cores = len(_cores())
        processes = max(1, min(tasks, cores) - joins)
        threads = cores // (processes + joins)
        if joins:
            use_threads(threads)
            self._holds_back = True
        others = active_children()  # of whoever called: they are not ours to end
        with ProcessPoolExecutor(
            processes, get_context("spawn"), _start_helper, (threads,)
        ) as executor:
            try:
                yield executor
            finally:
                for process in set(active_children()).difference(others):
                    process.terminate()
                self.spread()

    def spread(self) -> None:
        """Take all threads again that a pool shares out, since no helper needs its own any more."""
        if self._holds_back:
            use_threads(len(_cores()))
            self._holds_back = False

    def fail_together(self) -> bool:
        """Whether all workers come here, each with an error, within a few seconds."""
        return True

    def abort(self, status: int) -> None:
        """End the workers that wait for one which failed."""


class MPIWorkers(Workers):
    """The processes of an mpi4py communicator."""

    def __init__(self, communicator: Any) -> None:
        super().__init__()
        from mpi4py import MPI

        self.rank, self.size = communicator.rank, communicator.size
        self._mpi, self._all = MPI, communicator
        self._farewell = communicator.Dup()  # apart from the sums that others may still wait for
        self._machine = communicator.Split_type(MPI.COMM_TYPE_SHARED)
        self._is_stopping = False
        cores = set().union(*self._machine.allgather(_cores()))
        use_threads(len(cores) // self._machine.size)

    def total(self, work: Callable[[], Statistics], parameters: int) -> Statistics:
        """Send the vector with three more numbers: Σ nll in two halves, and who should stop.

        All are integers whose totals stay below 2^53, so that any order of sums will do; a worker
        that failed sends NaN, which makes every sum NaN.
        """
        part, error = _attempt(work)
        sent = np.full(parameters + 3, np.nan)
        if part is not None:
            sent[:-3] = part.vector
            sent[-3:] = *divmod(part.loss, _HALF), self.asked_to_stop
        self._all.Allreduce(self._mpi.IN_PLACE, sent, op=self._mpi.SUM)
        if part is None or np.isnan(sent[-1]):
            raise self._first(error)
        high, low, stops = map(int, sent[-3:])
        self._is_stopping = stops > 0
        return Statistics(sent[:-3], high * _HALF + low, part.step_size, part.step_size)

    def is_stopping(self) -> bool:
        """See ``Workers``: the same answer on all of them."""
        return self._is_stopping

    def each(self, work: Callable[[], T]) -> T:
        """Let every worker do the same, the first of each machine before the others."""
        for turn in (True, False):
            if (self._machine.rank == 0) == turn:
                result, error = _attempt(work)
            self._machine.Barrier()
        if any(self._all.allgather(error is not None)):
            raise self._first(error)
        return cast(T, result)

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first worker do something, and return its result to all."""
        result, error = self._all.bcast(_attempt(work) if self.rank == 0 else None)
        if error:
            raise error
        return cast(T, result)

    def agree(self, what: str, value: str) -> None:
        """Raise MinigenError unless all workers have the same value."""
        values = self._all.allgather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise MinigenError(
                    f"all workers must have the same {what}, and worker {rank} of {self.size} "
                    f"has another than worker 0 ({other}, not {values[0]})"
                )

    def _first(self, error: MinigenError | None) -> MinigenError:
        """Return the first of all workers' errors, saying whose it is if not everyone's."""
        errors: list[MinigenError | None] = self._all.allgather(error)
        rank, first = next((rank, error) for rank, error in enumerate(errors) if error)
        is_everyones = {str(error) for error in errors} == {str(first)}
        return first if is_everyones else type(first)(f"worker {rank} of {self.size}: {first}")

    def helpers(self) -> int:
        """How many tasks of a pool can run beside the first worker."""
        return self.size - 1

    @contextmanager
    def pool(self, tasks: int, *, joins: bool = False) -> Iterator[Executor | None]:
        """Let the other workers run the tasks that the first one hands out.

        An interruption has reached them already: mpiexec passes it on.
        """
        from mpi4py.futures import MPICommExecutor

        executor: Any
        with (
            heard_by(let_pass) if self.rank > 0 else nullcontext(),  # between two tasks
            MPICommExecutor(self._all, root=0) as executor,
        ):
            yield executor

    def fail_together(self) -> bool:
        """Whether all workers come here, each with an error, within a few seconds."""
        request, deadline = self._farewell.Ibarrier(), time.monotonic() + _PATIENCE
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def abort(self, status: int) -> None:
        """End all workers, those included that wait for one which failed."""
        time.sleep(0.5)  # mpiexec passes on what was said, unless it ends first
        self._all.Abort(status)


def join(workers: Any = None) -> Workers:
    """Return the workers of an mpi4py communicator; of none, this process alone."""
    if isinstance(workers, Workers):
        return workers
    if workers is None:
        return Workers()
    if not hasattr(workers, "Allreduce"):
        raise OptionError(f"workers must be a communicator of mpi4py (got {shown(workers)})")
    return MPIWorkers(workers)


def from_mpiexec() -> Workers:
    """Return the workers that ``mpiexec`` or its like started, or this process alone.

    Raises MinigenError where several were started that cannot find each other: each would do
    all of the work, and write to the same folder.
    """
    started = next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)
    if started == 1:
        return Workers()
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is told below
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no library of MPI
        raise MinigenError(
            f"{started} processes were started, but they cannot work together without mpi4py "
            f"(pip install 'minigen[mpi]'): {error}"
        ) from None
    if MPI.COMM_WORLD.size != started:
        library = " ".join(MPI.Get_library_version().splitlines()[0].split())
        raise MinigenError(
            f"{started} processes were started, but MPI connects {MPI.COMM_WORLD.size}: use the "
            f"mpiexec of the library that mpi4py loads ({library})"
        )
    return MPIWorkers(MPI.COMM_WORLD)


def use_threads(count: int) -> None:
    """Hold this process at so many threads, or fewer, where others compute on the same cores."""
    most = _most_threads()
    resources.cache_clear()  # scipy may have brought a BLAS of its own since
    resources()[1].limit(limits=max(1, min(count, most)))
    resources.cache_clear()


@cache
def _most_threads() -> int:
    return resources()[0]  # as many as were allowed at the start


def _start_helper(threads: int) -> None:
    """Prepare a process of the pool; apart from the terminal, whose Ctrl-C is passed on once."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_threads(threads)


def _end_with_parent() -> None:
    """End this process where the one that started it was killed, and could not say so."""
    parent: Any = parent_process()
    wait([parent.sentinel])
    os._exit(1)


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _attempt(work: Callable[[], T]) -> tuple[T | None, MinigenError | None]:
    try:
        return work(), None
    except MinigenError as error:
        return None, error
