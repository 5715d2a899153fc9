"""The communicator of a job with one rank: every collective is the identity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpitrain.comm.communicator import Buffer, Communicator, Op, Request
from mpitrain.faults.activity import Activity


class LocalCommunicator:
    """A group of one. Nothing travels, MPI is not loaded."""

    rank = 0
    size = 1
    library = "no MPI (one rank)"
    can_shrink = False
    tied: Sequence[Communicator] = ()

    def __init__(self) -> None:
        self.activity = Activity()

    def isend(self, buffer: Buffer, destination: int) -> Request:
        """Local: not possible, there is no other rank."""
        raise ValueError("one rank alone has nobody to send to")

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """Local: not possible, there is no other rank."""
        raise ValueError("one rank alone has nobody to receive from")

    def all_reduce(self, buffer: Buffer, op: Op = "sum") -> None:
        """Collective: the reduction over one rank is its own buffer."""

    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        """Collective: copy `send` to `receive[0]`."""
        receive.reshape(-1)[:] = send.reshape(-1)

    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Collective: copy `send` to `receive`."""
        receive.reshape(-1)[:] = send.reshape(-1)

    def all_to_all_v(self, send: Buffer, send_counts: list[int], receive: Buffer, counts: list[int]) -> None:
        """Collective: copy `send` to `receive`."""
        receive.reshape(-1)[:] = send.reshape(-1)

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Collective: nothing to do."""

    def barrier(self) -> None:
        """Collective: nothing to do."""

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Collective: `obj` itself."""
        return obj

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Collective: a list of `obj` alone."""
        return [obj]

    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        """Collective: itself, or None when `ranks` is empty."""
        return self if list(ranks) == [0] else None

    def revoke(self) -> None:
        """Local: nobody waits here."""

    def shrink(self) -> list[int]:
        """Collective: nobody can be missing."""
        return [0]

    def agree(self, flag: bool) -> bool:
        """Collective: `flag` itself."""
        return flag

    def abort(self, code: int) -> None:
        """Local: end this process at once."""
        os._exit(code)
