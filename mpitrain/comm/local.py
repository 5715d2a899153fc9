"""The communicator of a job with one rank: every collective is the identity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpitrain.comm.communicator import Buffer, Communicator, Op, Request
from mpitrain.faults.activity import Activity


class LocalCommunicator(Communicator):
    """A group of one. Nothing travels, MPI is not loaded."""

    rank = 0
    size = 1
    library = "no MPI (one rank)"
    can_shrink = False
    tied: Sequence[Communicator] = ()

    def __init__(self) -> None:
        self.activity = Activity()

    def isend(self, buffer: Buffer, destination: int) -> Request:
        raise ValueError("one rank alone has nobody to send to")

    def irecv(self, buffer: Buffer, source: int) -> Request:
        raise ValueError("one rank alone has nobody to receive from")

    def all_reduce(self, buffer: Buffer, op: Op = "sum") -> None:
        """Collective: the reduction over one rank is its own buffer."""

    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        receive.reshape(-1)[:] = send.reshape(-1)

    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        receive.reshape(-1)[:] = send.reshape(-1)

    def all_to_all_v(self, send: Buffer, send_counts: list[int], receive: Buffer, counts: list[int]) -> None:
        receive.reshape(-1)[:] = send.reshape(-1)

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Collective: nothing to do."""

    def barrier(self) -> None:
        """Collective: nothing to do."""

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        return obj

    def all_gather_obj(self, obj: Any) -> list[Any]:
        return [obj]

    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        return self if list(ranks) == [0] else None

    def revoke(self) -> None:
        """Local: nobody waits here."""

    def shrink(self) -> list[int]:
        return [0]

    def agree(self, flag: bool) -> bool:
        return flag

    def abort(self, code: int) -> None:
        os._exit(code)
