"""The communicator over MPI, through mpi4py. The only place where mpi4py is imported."""

from __future__ import annotations

import copy
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpitrain.comm.communicator import Buffer, Op
from mpitrain.comm.shared_memory import remove_names
from mpitrain.faults.activity import Activity
from mpitrain.runtime.launcher import Launcher, check_library
from mpitrain.runtime.topology import Topology, topology

Method = TypeVar("Method", bound=Callable[..., Any])
SPIN_SECONDS = 3e-4
LONGEST_SLEEP_SECONDS = 2e-4


def poll(request: Any) -> None:
    """Local: wait for an MPI request without taking the processor from those who have work.

    MPI waits by polling. Where ranks share cores, the rank that waits would take the time of the
    rank it waits for. So every test but the first gives way, and after a while this sleeps, never
    longer than an eighth of the time already waited: the delay stays within 12 %.
    """
    if request.Test():
        return
    start = time.perf_counter()
    while not request.Test():
        waited = time.perf_counter() - start
        if waited < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(LONGEST_SLEEP_SECONDS, waited / 8))


def entered(method: Method) -> Method:
    """Local: a collective that notes for the watchdog that this rank has come to it."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: MpiCommunicator, *args: Any) -> Any:
        activity = self.activity
        activity.position += 1
        if activity.inside is not None:  # somebody above has told it better
            return method(self, *args)
        activity.inside = name
        try:
            return method(self, *args)
        finally:
            activity.inside = None

    return call  # type: ignore[return-value]


class _MpiRequest:
    def __init__(self, request: Any) -> None:
        self._request = request

    def test(self) -> bool:
        return bool(self._request.Test())

    def wait(self) -> None:
        poll(self._request)


class MpiCommunicator:
    """All ranks of the job, on a duplicate of `COMM_WORLD`: the user's own messages never meet ours.

    Args:
        launcher: what started the job, as far as it tells.

    Raises:
        LauncherError: the MPI library in use cannot be started by this launcher.
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            # Of two mixed MPIs, MPI_Init may end the process before anything can be said.
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI

        self.library: str = MPI.Get_library_version().split("\n")[0].split(", package")[0].strip(" \x00")
        check_library(launcher, MPI.Get_library_version())
        if not MPI.Is_initialized():
            with warnings.catch_warnings():
                # Of two mixed MPIs mpi4py warns on each rank; `launcher.check` says it once, and what to do.
                warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._mpi = MPI
        self.activity = Activity()
        # Ranks of this host outnumber its cores: every wait then polls politely, else small
        # reductions use MPI's blocking calls, which answer sooner.
        self.crowded = False
        self._operations = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
        self._use(MPI.COMM_WORLD.Dup())  # returns when all ranks have come so far
        remove_names()

    def _use(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    @property
    def thread_level(self) -> str:
        """What MPI lets threads do: `single`, `funneled`, `serialized` or `multiple`."""
        levels = {
            self._mpi.THREAD_SINGLE: "single",
            self._mpi.THREAD_FUNNELED: "funneled",
            self._mpi.THREAD_SERIALIZED: "serialized",
            self._mpi.THREAD_MULTIPLE: "multiple",
        }
        return levels[self._mpi.Query_thread()]

    def topology(self) -> Topology:
        """Collective: where each rank is, from MPI's shared-memory domains."""
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        leader = node.bcast(self.rank, root=0)
        node.Free()
        places = self._comm.allgather((leader, os.uname().nodename))
        return topology(self.rank, [place[0] for place in places], [place[1] for place in places])

    def isend(self, buffer: Buffer, destination: int) -> _MpiRequest:
        """Local: start sending; `buffer` must not change until the request is done."""
        return _MpiRequest(self._comm.Isend([buffer.view(np.uint8), self._mpi.BYTE], destination, 0))

    def irecv(self, buffer: Buffer, source: int) -> _MpiRequest:
        """Local: start receiving into `buffer`."""
        return _MpiRequest(self._comm.Irecv([buffer.view(np.uint8), self._mpi.BYTE], source, 0))

    @entered
    def all_reduce(self, buffer: Buffer, op: Op = "sum") -> None:
        """Collective: MPI_Allreduce in place; half precisions, which MPI lacks, travel as float32."""
        if buffer.dtype.itemsize == 2 and buffer.dtype.kind in "fV":
            wide = buffer.astype(np.float32)
            self.all_reduce(wide, op)
            buffer[...] = wide.astype(buffer.dtype)
            return
        if buffer.dtype.kind == "b":
            wide = buffer.astype(np.uint8)
            self.all_reduce(wide, "min" if op in ("min", "product") else "max")
            buffer[...] = wide.astype(buffer.dtype)
            return
        operation = self._operations[op]
        if self.crowded:
            poll(self._comm.Iallreduce(self._mpi.IN_PLACE, buffer, operation))
        else:
            self._comm.Allreduce(self._mpi.IN_PLACE, buffer, operation)

    @entered
    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        """Collective: MPI_Iallgather of bytes, waited for politely (ranks may come late)."""
        byte = self._mpi.BYTE
        poll(self._comm.Iallgather([_bytes(send), byte], [_bytes(receive), byte]))

    @entered
    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Collective: MPI_Iallgatherv of bytes."""
        byte, itemsize = self._mpi.BYTE, send.dtype.itemsize
        byte_counts = [count * itemsize for count in counts]
        poll(self._comm.Iallgatherv([_bytes(send), byte], [_bytes(receive), byte_counts, None, byte]))

    @entered
    def all_to_all_v(self, send: Buffer, send_counts: list[int], receive: Buffer, counts: list[int]) -> None:
        """Collective: MPI_Ialltoallv of bytes."""
        byte, itemsize = self._mpi.BYTE, send.dtype.itemsize
        out = [count * itemsize for count in send_counts]
        into = [count * itemsize for count in counts]
        poll(self._comm.Ialltoallv([_bytes(send), out, None, byte], [_bytes(receive), into, None, byte]))

    @entered
    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Collective: MPI_Ibcast of bytes."""
        poll(self._comm.Ibcast([_bytes(buffer), self._mpi.BYTE], root))

    @entered
    def barrier(self) -> None:
        """Collective: MPI_Ibarrier."""
        poll(self._comm.Ibarrier())

    @entered
    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Collective: a pickled object of rank `root`; ranks may come late, and are waited for politely."""
        poll(self._comm.Ibarrier())
        return self._comm.bcast(obj, root)

    @entered
    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Collective: the pickled objects of all ranks; ranks may come late, and are waited for politely."""
        poll(self._comm.Ibarrier())
        return list(self._comm.allgather(obj))

    def split(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        """Collective: MPI_Comm_create; ranks may come late, and are waited for politely."""
        poll(self._comm.Ibarrier())
        group = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create(group)
        group.Free()
        if comm == self._mpi.COMM_NULL:
            return None
        part = copy.copy(self)
        part.activity = Activity()  # other ranks enter other collectives: the watchdog compares those of all
        part._use(comm)
        return part

    def ranks_of(self, comm: Any) -> list[int]:
        """Local: the ranks here of the processes of another mpi4py communicator, in its order.

        Raises:
            ValueError: it is no intracommunicator of mpi4py, or has processes of another job.
        """
        if not isinstance(comm, self._mpi.Intracomm):
            raise ValueError(f"expected an mpi4py intracommunicator, not {type(comm).__name__}")
        theirs, ours = comm.Get_group(), self._comm.Get_group()
        ranks = list(theirs.Translate_ranks(list(range(comm.Get_size())), ours))
        if self._mpi.UNDEFINED in ranks:
            raise ValueError("the communicator has processes that are not in this job")
        return ranks

    def abort(self, code: int) -> None:
        """Local: MPI_Abort, which ends all ranks."""
        time.sleep(0.5)  # MPICH drops what was just written to stderr
        self._mpi.COMM_WORLD.Abort(code)


def _bytes(buffer: Buffer) -> Buffer:
    return buffer.reshape(-1).view(np.uint8)
