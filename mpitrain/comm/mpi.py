"""The communicator over MPI, through mpi4py. The only place where mpi4py is imported."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpitrain.comm import object_messages
from mpitrain.comm.communicator import Buffer, Communicator, Op
from mpitrain.comm.shared_memory import remove_names
from mpitrain.comm.waiting import INSIDE, done, poll, wait
from mpitrain.errors import RankLostError
from mpitrain.faults import interfaces
from mpitrain.faults.activity import Activity
from mpitrain.runtime.launcher import Launcher, check_library
from mpitrain.runtime.topology import NODE_VARIABLE, Topology, machine, topology

Method = TypeVar("Method", bound=Callable[..., Any])
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set for ranks by `mpirun --with-ft ulfm`
# Of one call of MPI, whose counts are ints: of bytes, and of the elements that it makes of them.
LARGEST_BYTES = 1 << 30


def entered(method: Method) -> Method:
    """Local: a collective that notes for the watchdog that this rank has come to it, and tells of lost ranks."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: MpiCommunicator, *args: Any) -> Any:
        activity = self.activity
        activity.position += 1
        inside = activity.inside
        activity.inside = inside or name  # somebody above may have told it better
        try:
            return method(self, *args)
        except self.failure as error:
            raise self.explained(error) from error
        finally:
            activity.inside = inside

    return call  # type: ignore[return-value]


class _MpiRequest:
    def __init__(self, communicator: MpiCommunicator, requests: list[Any]) -> None:
        # The third is the one on which they were made: when they fail, there may be another one, without the lost
        # ranks.
        self._communicator, self._requests, self._comm = communicator, requests, communicator.comm

    def test(self) -> bool:
        try:
            while self._requests and done(self._requests[-1]):
                self._requests.pop()
            return not self._requests
        except self._communicator.failure as error:
            raise self._communicator.explained(error, self._comm) from error

    def wait(self) -> None:
        try:
            for request in self._requests:
                wait(request)
        except self._communicator.failure as error:
            raise self._communicator.explained(error, self._comm) from error


class MpiCommunicator:
    """All ranks of the job, on a duplicate of `COMM_WORLD`: the user's own messages never meet ours.

    Where MPI has been started so that it survives the loss of ranks (Open MPI 5, `mpirun --with-ft ulfm`; see
    "User-Level Failure Mitigation" in chapter "Fault Tolerance" of Open MPI's documentation), what fails because a
    rank has died raises RankLostError on all the others: the first that notices it revokes the communicator.

    Args:
        launcher: what started the job, as far as it tells.

    Raises:
        LauncherError: the MPI library in use cannot be started by this launcher.
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            # Of two mixed MPIs, MPI_Init may end the process before anything can be said.
            # Where it does not begin MPI by itself, it would not end it by itself either: the second says that it does.
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI

        self.library: str = MPI.Get_library_version().split("\n")[0].split(", package")[0].strip(" \x00")
        check_library(launcher, MPI.Get_library_version())
        fault_tolerant = os.environ.get(FAULT_TOLERANT) == "1" and self.library.startswith("Open MPI")
        if fault_tolerant:  # else MPI_Finalize now and then waits for the lost, for ever (seen: Open MPI 5.0.11)
            os.environ.setdefault("OMPI_MCA_ompi_async_mpi_finalize", "1")
        if not MPI.Is_initialized():
            with warnings.catch_warnings():
                # Of two mixed MPIs mpi4py warns on each rank; `launcher.check` says it once, and what to do.
                warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
                _init_thread(MPI)
        self._mpi = MPI
        self.failure: type[Exception] = MPI.Exception  # the exception of mpi4py
        # when the loss of a rank was noticed here, as of `time.monotonic`; None if all are there
        self.lost_seconds: float | None = None
        self.tied: Sequence[Communicator] = ()  # communicators that are revoked together with this one
        self.largest_bytes = LARGEST_BYTES  # of one call of MPI; what is larger is cut, on all ranks alike
        self._can_shrink = fault_tolerant
        self._revoked: list[Any] = []  # kept: what was under way on them is forgotten by nobody
        self.activity = Activity()
        # Ranks of this host outnumber its cores: every wait then polls politely, else small
        # reductions use MPI's blocking calls, which answer sooner.
        self.crowded = False
        self._operations = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
        self._use(MPI.COMM_WORLD.Dup())  # returns when all ranks have come so far
        remove_names()

    def _use(self, comm: Any) -> None:
        self._comm = comm
        if self._can_shrink:
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)  # which mpi4py makes an exception
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
        """Collective: where each rank is, from what has placed the ranks, from the hosts, or from MPI."""
        host = os.uname().nodename
        told: Any = os.environ.get(NODE_VARIABLE) or machine(host, interfaces.addresses({}))
        places = self._comm.allgather((told, host))
        if None in (place[0] for place in places):
            node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
            places = self._comm.allgather((node.bcast(self.rank, root=0), host))
            node.Free()
        return topology(self.rank, [place[0] for place in places], [place[1] for place in places])

    def isend(self, buffer: Buffer, destination: int) -> _MpiRequest:
        """Local: start sending; `buffer` must not change until the request is done."""
        try:
            pieces = self._pieces(buffer.view(np.uint8))
            with INSIDE:
                requests = [self._comm.Isend([piece, self._mpi.BYTE], destination, 0) for piece in pieces]
            return _MpiRequest(self, requests)
        except self.failure as error:
            raise self.explained(error) from error

    def irecv(self, buffer: Buffer, source: int) -> _MpiRequest:
        """Local: start receiving into `buffer`."""
        try:
            pieces = self._pieces(buffer.view(np.uint8))
            with INSIDE:
                requests = [self._comm.Irecv([piece, self._mpi.BYTE], source, 0) for piece in pieces]
            return _MpiRequest(self, requests)
        except self.failure as error:
            raise self.explained(error) from error

    def _pieces(self, flat: Buffer) -> list[Buffer]:
        """Local: of a one-dimensional array, each small enough for one call of MPI."""
        if flat.nbytes <= self.largest_bytes:
            return [flat]
        step = max(1, self.largest_bytes // flat.itemsize)
        return [flat[start : start + step] for start in range(0, flat.size, step)]

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
        for piece in self._pieces(buffer.reshape(-1)):
            if self.crowded:
                poll(self._comm.Iallreduce, self._mpi.IN_PLACE, piece, operation)
            else:
                self._comm.Allreduce(self._mpi.IN_PLACE, piece, operation)

    @entered
    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        """Collective: MPI_Iallgather of bytes, waited for politely (ranks may come late)."""
        if receive.nbytes > self.largest_bytes:
            self.all_gather_v(send, receive, [send.size] * self.size)
            return
        byte = self._mpi.BYTE
        poll(self._comm.Iallgather, [_bytes(send), byte], [_bytes(receive), byte])

    @entered
    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Collective: MPI_Iallgatherv of bytes; of what is too much for that, each rank's is broadcast."""
        if receive.nbytes > self.largest_bytes:
            parts = np.split(receive.reshape(-1), np.cumsum(counts)[:-1])
            parts[self.rank][:] = send.reshape(-1)
            for root, part in enumerate(parts):
                self.broadcast(part, root)
            return
        byte, itemsize = self._mpi.BYTE, send.dtype.itemsize
        byte_counts = [count * itemsize for count in counts]
        poll(self._comm.Iallgatherv, [_bytes(send), byte], [_bytes(receive), byte_counts, None, byte])

    @entered
    def all_to_all_v(self, send: Buffer, send_counts: list[int], receive: Buffer, counts: list[int]) -> None:
        """Collective: MPI_Ialltoallv of bytes; where that is too much for some rank, each sends to each."""
        # Each rank has other counts, and all must go the same way: half of them in Ialltoallv would wait for the
        # others.
        most = np.array([max(send.nbytes, receive.nbytes)], np.int64)
        self.all_reduce(most, "max")
        if most[0] > self.largest_bytes:
            out, into = (
                np.split(_bytes(buffer), np.cumsum(sizes)[:-1] * buffer.dtype.itemsize)
                for buffer, sizes in ((send, send_counts), (receive, counts))
            )
            requests = [self.irecv(part, rank) for rank, part in enumerate(into) if part.size]
            requests += [self.isend(part, rank) for rank, part in enumerate(out) if part.size]
            for request in requests:
                request.wait()
            return
        byte, itemsize = self._mpi.BYTE, send.dtype.itemsize
        sent = [count * itemsize for count in send_counts]
        received = [count * itemsize for count in counts]
        poll(self._comm.Ialltoallv, [_bytes(send), sent, None, byte], [_bytes(receive), received, None, byte])

    @entered
    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Collective: MPI_Ibcast of bytes."""
        for piece in self._pieces(_bytes(buffer)):
            poll(self._comm.Ibcast, [piece, self._mpi.BYTE], root)

    @entered
    def barrier(self) -> None:
        """Collective: MPI_Ibarrier."""
        poll(self._comm.Ibarrier)

    @entered
    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Collective: a pickled object of rank `root`; ranks may come late, and are waited for politely."""
        return object_messages.broadcast_obj(self, self._mpi.pickle, obj, root)

    @entered
    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Collective: the pickled objects of all ranks; ranks may come late, and are waited for politely."""
        return object_messages.all_gather_obj(self, self._mpi.pickle, obj)

    def split(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        """Collective: MPI_Comm_create; ranks may come late, and are waited for politely."""
        # MPI_Comm_create only blocks, and MPI waits by polling: who comes early would take the processor from the
        # others.
        poll(self._comm.Ibarrier)
        group = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create(group)
        group.Free()
        if comm == self._mpi.COMM_NULL:
            return None
        part = copy.copy(self)
        part.tied = ()
        part.activity = Activity()  # other ranks enter other collectives: the watchdog compares those of all
        part._use(comm)
        return part

    @property
    def can_shrink(self) -> bool:
        """Whether MPI lets the others go on when a rank has died."""
        return self._can_shrink

    @property
    def comm(self) -> Any:
        """The communicator of MPI; another one once ranks were lost."""
        return self._comm

    def explained(self, error: Exception, comm: Any = None) -> Exception:
        """Local: what to raise for an error of MPI; one that tells of a lost rank is made known to all ranks.

        Args:
            error: of MPI.
            comm: on which it was; by default the present one. What is told of one that was left behind is old.
        """
        mpi = self._mpi
        # The last: another rank has noticed the death, and has revoked the communicator for all.
        lost = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        if not self._can_shrink or error.Get_error_class() not in lost:  # type: ignore[attr-defined]
            return error
        told = RankLostError("a rank of the job has died")
        if comm is not None and comm is not self._comm:
            return told
        self.lost_seconds = self.lost_seconds or time.monotonic()
        self.revoke()
        # A rank that waits in one of these would wait for ranks that are about to shrink together.
        for other in self.tied:
            other.revoke()
        self.activity.error = told
        return told

    def revoke(self) -> None:
        """Local: MPI_Comm_revoke: whatever any rank does here from now on raises RankLostError."""
        with contextlib.suppress(self.failure):
            self._comm.Revoke()

    @entered
    def shrink(self) -> list[int]:
        """Collective among the ranks that are left: MPI_Comm_shrink; the others are left behind for good.

        Returns:
            For each rank that is left, in the new order, which it was.
        """
        # This rank may have heard of the loss elsewhere, and others may still wait here: MPI_Comm_shrink needs them
        # all.
        self.revoke()
        before, comm = self._comm, self._comm.Shrink()
        self._revoked.append(before)
        self._use(comm)
        self.lost_seconds = None
        return list(comm.Get_group().Translate_ranks(list(range(self.size)), before.Get_group()))

    @entered
    def agree(self, flag: bool) -> bool:
        """Collective: MPI_Comm_agree."""
        return bool(self._comm.Agree(int(flag)))

    def error(self, code: int) -> Exception:
        """Local: what to raise where machine code got this code from MPI."""
        return self.explained(self._mpi.Exception(code))

    @property
    def file(self) -> str:
        """A loaded library through which functions of MPI are found."""
        return str(self._mpi.__file__)

    def handles(self) -> tuple[int, ...]:
        """Local: for machine code: communicator, MPI_BYTE, MPI_FLOAT, MPI_DOUBLE, MPI_SUM and MPI_IN_PLACE."""
        mpi = self._mpi
        handles = [mpi._handleof(one) for one in (self._comm, mpi.BYTE, mpi.FLOAT, mpi.DOUBLE, mpi.SUM)]
        return (*handles, int(mpi.IN_PLACE) % (1 << 64))

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


def _init_thread(mpi: Any) -> None:
    """Collective: MPI_Init_thread. That of mpi4py keeps Python's other threads waiting until all ranks have come."""
    try:
        # ctypes lets go of the interpreter's lock, so that the limit of the start runs while MPI starts.
        init = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    init(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does: errors become exceptions


def finalize() -> None:
    """Collective: end the use of MPI."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def _bytes(buffer: Buffer) -> Buffer:
    return buffer.reshape(-1).view(np.uint8)
