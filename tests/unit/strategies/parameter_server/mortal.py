"""Ranks that are threads, of which some end while the others go on, as with MPI that was started to survive it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.comm.communicator import Buffer
from mpitrain.errors import RankLostError
from tests.simulated import SimulatedCommunicator


class MortalCommunicator:
    """A communicator that has other ranks once it was shrunk.

    Args:
        now: all ranks.
        left: those that will be left when the others have died.
        after: of these; None on ranks that will die.
    """

    can_shrink = True

    def __init__(self, now: SimulatedCommunicator, left: Sequence[int], after: SimulatedCommunicator | None) -> None:
        self._now, self._left, self._after = now, list(left), after
        self.tied: Sequence[Any] = ()

    @classmethod
    def of(cls, now: SimulatedCommunicator, left: Sequence[int]) -> MortalCommunicator:
        """Collective."""
        return cls(now, left, now.split(left))

    def split(self, ranks: Sequence[int]) -> MortalCommunicator | None:
        part = self._now.split(ranks)
        left = [rank for rank in ranks if rank in self._left]
        after = None if self._after is None else self._after.split([self._left.index(rank) for rank in left])
        return None if part is None else MortalCommunicator(part, [ranks.index(rank) for rank in left], after)

    def revoke(self) -> None:
        self._now.abort(0)

    def shrink(self) -> list[int]:
        self.revoke()
        assert self._after is not None
        self._after.activity, self._now = self._now.activity, self._after
        return self._left

    def irecv(self, buffer: Buffer, source: int) -> _Receive:
        return _Receive(self, self._call(self._now.irecv, buffer, source))

    def isend(self, buffer: Buffer, destination: int) -> Any:
        self._call(self._now._shared.barrier.wait if self._now._shared.barrier.broken else lambda: None)
        return self._now.isend(buffer, destination)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except threading.BrokenBarrierError as error:
            for other in self.tied:
                other.revoke()
            self._now.activity.error = told = RankLostError("a thread has ended")
            raise told from error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._now, name)
        return functools.partial(self._call, found) if callable(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._now, name, value) if name == "activity" else super().__setattr__(name, value)


class _Receive:
    def __init__(self, communicator: MortalCommunicator, request: Any) -> None:
        self._communicator, self._request = communicator, request

    def test(self) -> bool:
        return bool(self._communicator._call(self._request.test))

    def wait(self) -> None:
        while not self.test():
            threading.Event().wait(1e-4)
