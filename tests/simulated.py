"""N ranks as N threads of one process: the contract without MPI, for tests and planning."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpitrain.comm.communicator import UFUNCS, Buffer, Communicator, Op
from mpitrain.faults.activity import Activity

Result = TypeVar("Result")
TIMEOUT_SECONDS = 180.0  # on a busy machine; then a test that hangs fails


class _Done:
    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _Receive:
    def __init__(self, shared: _Shared, mailbox: queue.Queue[Buffer], buffer: Buffer, ticket: _Ticket) -> None:
        self._shared, self._mailbox, self._buffer, self._ticket, self._done = shared, mailbox, buffer, ticket, False

    def test(self) -> bool:
        if self._shared.barrier.broken:
            raise threading.BrokenBarrierError
        if not self._done and self._ticket.is_next() and not self._mailbox.empty():
            self._take()
        return self._done

    def wait(self) -> None:
        if not self._done:
            if not self._ticket.is_next():
                raise AssertionError("receives from one rank complete in the order they were posted")
            self._take()

    def _take(self) -> None:
        message = self._mailbox.get(timeout=TIMEOUT_SECONDS)
        if message.nbytes != self._buffer.nbytes:
            raise AssertionError(f"sent {message.nbytes} bytes, expected {self._buffer.nbytes}")
        self._buffer.reshape(-1).view(np.uint8)[:] = message
        self._ticket.served += 1
        self._done = True


class _Ticket:
    """Keeps the receives of one (source, destination) pair in order."""

    def __init__(self, line: list[int]) -> None:
        self._line = line
        self.number = line[1]
        line[1] += 1

    @property
    def served(self) -> int:
        return self._line[0]

    @served.setter
    def served(self, value: int) -> None:
        self._line[0] = value

    def is_next(self) -> bool:
        return self.number == self._line[0]


class _Shared:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self.slots: list[Any] = [None] * size
        # Made here, not at the first use, which may be by two threads at once.
        pairs = [(source, destination) for source in range(size) for destination in range(size)]
        self.mail: dict[tuple[int, int], queue.Queue[Buffer]] = {pair: queue.Queue() for pair in pairs}
        self.lines: dict[tuple[int, int], list[int]] = {pair: [0, 0] for pair in pairs}


class SimulatedCommunicator:
    """One thread's end of a simulated group."""

    library = "simulated"
    can_shrink = False
    tied: Sequence[Communicator] = ()

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared = shared
        self.rank = rank
        self.size = shared.size
        self.activity = Activity()

    def isend(self, buffer: Buffer, destination: int) -> _Done:
        """Local: the message is copied, so the send is complete at once."""
        self._shared.mail[self.rank, destination].put(buffer.reshape(-1).view(np.uint8).copy())
        return _Done()

    def irecv(self, buffer: Buffer, source: int) -> _Receive:
        """Local: completes when the matching message has been taken."""
        key = (source, self.rank)
        return _Receive(self._shared, self._shared.mail[key], buffer, _Ticket(self._shared.lines[key]))

    def all_reduce(self, buffer: Buffer, op: Op = "sum") -> None:
        """Collective: reduce in rank order, so that all ranks get the same bits."""
        parts = self._all(buffer.copy())
        total = parts[0]
        for part in parts[1:]:
            total = UFUNCS[op](total, part)
        buffer[...] = total

    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        """Collective: concatenate in rank order."""
        receive.reshape(-1)[:] = np.concatenate([p.reshape(-1) for p in self._all(send.copy())])

    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Collective: concatenate in rank order."""
        self.all_gather(send, receive)

    def all_to_all_v(self, send: Buffer, send_counts: list[int], receive: Buffer, counts: list[int]) -> None:
        """Collective: take this rank's run from every rank."""
        runs = []
        for part, part_counts in self._all((send.copy().reshape(-1), list(send_counts))):
            start = sum(part_counts[: self.rank])
            runs.append(part[start : start + part_counts[self.rank]])
        receive.reshape(-1)[:] = np.concatenate(runs)

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Collective: copy rank `root`'s buffer."""
        value = self.broadcast_obj(buffer.copy(), root)
        buffer[...] = value

    def barrier(self) -> None:
        """Collective: wait for all threads."""
        self._shared.barrier.wait()

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Collective: rank `root`'s object."""
        return self.all_gather_obj(obj)[root]

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Collective: every thread's object; a copy, as between processes."""
        return self._all(obj, copy.deepcopy)

    def _all(self, obj: Any, taken: Callable[[list[Any]], list[Any]] = list) -> list[Any]:
        self._shared.slots[self.rank] = obj
        self.barrier()
        result = taken(self._shared.slots)
        # Nobody puts the next object there before all have taken this one.
        self.barrier()
        return result

    def split(self, ranks: Sequence[int]) -> SimulatedCommunicator | None:
        """Collective: threads of the same group share what rank 0 made."""
        shared = self._all(_Shared(len(ranks)))[0]
        return SimulatedCommunicator(shared, list(ranks).index(self.rank)) if self.rank in ranks else None

    def revoke(self) -> None:
        """Local: threads do not die."""

    def shrink(self) -> list[int]:
        """Collective: threads do not die."""
        return list(range(self.size))

    def agree(self, flag: bool) -> bool:
        """Collective: whether it is true in all threads."""
        return all(self.all_gather_obj(flag))

    def abort(self, code: int) -> None:
        """Local: break the barrier, so that the other threads stop too."""
        self._shared.barrier.abort()


def run(size: int, function: Callable[[SimulatedCommunicator], Result]) -> list[Result]:
    """Local: call `function(communicator)` in `size` threads; results in rank order.

    Raises:
        Exception: the first rank's that failed.
    """
    shared = _Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(SimulatedCommunicator(shared, rank))
        # Another rank has broken it, and its error is the one to tell.
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
