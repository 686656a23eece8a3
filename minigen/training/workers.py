"""Workers are processes that share each batch: its statistics add up exactly, so all stay equal.

Every worker calls the same methods in the same order, and an error of one is raised by all of them.
One process alone is the trivial case.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from minigen.errors import MinigenError, OptionError, shown
from minigen.exact.arithmetic import Integers
from minigen.model.gradient import Statistics
from minigen.model.parallel import cores, use_threads

T = TypeVar("T")

# What starts processes tells them their number in one of these: Open MPI, MPICH and its kin, Slurm.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_PATIENCE = 5.0  # seconds between the first and the last worker that meet the same error
_HALF = 2**32  # a loss is sent as two halves, since it may pass 2^53


class _Alone:
    """What a communicator of one process does."""

    rank, size = 0, 1

    def allgather(self, value: T) -> list[T]:
        return [value]

    def bcast(self, value: T) -> T:
        return value

    def barrier(self) -> None:
        pass


class Workers:
    """The processes of an mpi4py communicator, or this one alone, as worker 0 of 1.

    ``asked_to_stop`` is for a signal handler to set; ``is_stopping`` tells what all agreed on.
    """

    def __init__(self, communicator: Any = None) -> None:
        self.communicator: Any = communicator or _Alone()
        self._machine = self.communicator
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.asked_to_stop = self._is_stopping = False
        self._broken = ""
        if communicator:
            from mpi4py import MPI

            self._mpi = MPI
            self._farewell = communicator.Dup()  # apart from sums that others may still wait for
            self._machine = communicator.Split_type(MPI.COMM_TYPE_SHARED)
            together = set().union(*self._machine.allgather(cores()))
            use_threads(len(together) // self._machine.size)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied, and with it any run of several workers."""
        if self.size > 1:
            raise MinigenError("a run of several workers cannot be copied: save it, and load that")
        return vars(self)

    def share(self, indices: Integers) -> Integers:
        """Return the part of a batch (N,) that is this worker's: (n,), perhaps none."""
        return np.array_split(indices, self.size)[self.rank]

    def total(self, work: Callable[[], Statistics], parameters: int) -> Statistics:
        """Sum over all workers what ``work`` returns for their shares of a step: the whole step.

        ``parameters`` is the length of its vector. With it go three more numbers: Σ nll in two
        halves, and who should stop. All are integers whose totals stay below 2^53, so that any
        order of sums will do; a worker that failed sends NaN, which makes every sum NaN.
        """
        if self.size == 1:
            return work()
        part, error = _attempt(work)
        sent = np.full(parameters + 3, np.nan)
        if part is not None:
            sent[:-3] = part.vector
            sent[-3:] = *divmod(part.loss, _HALF), self.asked_to_stop
        self.communicator.Allreduce(self._mpi.IN_PLACE, sent, op=self._mpi.SUM)
        if np.isnan(sent[-1]):
            self._raise_first(error)
        assert part is not None
        high, low, stops = map(int, sent[-3:])
        self._is_stopping = stops > 0
        return Statistics(sent[:-3], high * _HALF + low, part.step_size, part.step_size)

    def is_stopping(self) -> bool:
        """Whether any of several had been asked to stop when the last total was taken."""
        return self.asked_to_stop if self.size == 1 else self._is_stopping

    def step(self, number: int, work: Callable[[], T]) -> T:
        """Take a step; of several workers, one that is interrupted in it has parted for good."""
        self._require_whole()
        try:
            return work()
        except MinigenError:  # which all of them raise
            raise
        except BaseException:
            if self.size > 1:
                self._broken = (
                    f"this run is broken: its step {number} was interrupted in one of {self.size} "
                    "workers; load its last checkpoint"
                )
            raise

    def _require_whole(self) -> None:
        if self._broken:
            raise MinigenError(self._broken)

    def each(self, work: Callable[[], T]) -> T:
        """Let every worker do the same, the first of each machine before the others."""
        for turn in (True, False):
            if (self._machine.rank == 0) == turn:
                result, error = _attempt(work)
            self._machine.barrier()
        self._raise_first(error)
        return cast(T, result)

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first worker do something, and return its result to all."""
        self._require_whole()
        result, error = self.communicator.bcast(_attempt(work) if self.rank == 0 else None)
        if error:
            raise error
        return cast(T, result)

    def agree(self, values: Mapping[str, str]) -> None:
        """Raise MinigenError unless all workers have the same values, naming the first other."""
        everyones = self.communicator.allgather(dict(values))
        for what, first in everyones[0].items():
            for rank, its in enumerate(everyones):
                if its[what] != first:
                    raise MinigenError(
                        f"all workers must have the same {what}, and worker {rank} of {self.size} "
                        f"has another than worker 0 ({its[what]}, not {first})"
                    )

    def _raise_first(self, error: MinigenError | None) -> None:
        """Raise the first of all workers' errors, if any, saying whose it is if not everyone's."""
        errors: list[MinigenError | None] = self.communicator.allgather(error)
        for rank, first in enumerate(errors):
            if first and {str(error) for error in errors} == {str(first)}:
                raise first
            if first:
                raise type(first)(f"worker {rank} of {self.size}: {first}")

    def fail_together(self) -> bool:
        """Whether all workers come here, each with an error, within a few seconds."""
        if self.size == 1:
            return True
        request, deadline = self._farewell.Ibarrier(), time.monotonic() + _PATIENCE
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def abort(self, status: int) -> None:
        """End all workers, those included that wait for one which failed."""
        time.sleep(0.5)  # mpiexec passes on what was said, unless it ends first
        self.communicator.Abort(status)


def join(workers: Any = None) -> Workers:
    """Return the workers of an mpi4py communicator; of none, this process alone."""
    if isinstance(workers, Workers):
        return workers
    if workers is not None and not hasattr(workers, "Allreduce"):
        raise OptionError(f"workers must be a communicator of mpi4py (got {shown(workers)})")
    return Workers(workers)


def from_mpiexec() -> Workers:
    """Return the workers that ``mpiexec`` or its like started, or this process alone.

    Raises MinigenError where several were started that cannot find each other: each would do
    all of the work, and write to the same folder.
    """
    sizes = (os.environ.get(name, "") for name in _SIZES)
    started = next((int(size) for size in sizes if re.fullmatch("[0-9]{1,9}", size)), 1)
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
    return Workers(MPI.COMM_WORLD)


def _attempt(work: Callable[[], T]) -> tuple[T | None, MinigenError | None]:
    try:
        return work(), None
    except MinigenError as error:
        return None, error
