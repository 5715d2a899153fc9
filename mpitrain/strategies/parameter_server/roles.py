"""Which ranks host the parameters, and which train. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.errors import UsageError

COLOCATED = "colocated"


@dataclass(frozen=True)
class Roles:
    """Who does what."""

    servers: tuple[int, ...]  # ranks that host the parameters
    workers: tuple[int, ...]  # ranks that compute gradients; the first of them speaks for the job

    @property
    def serving_only(self) -> tuple[int, ...]:
        """Servers that are no workers."""
        return tuple(rank for rank in self.servers if rank not in self.workers)

    def among(self, numbers: Sequence[int]) -> Roles:
        """Local: the same, once only these ranks are left, counted anew in this order."""
        place = {number: rank for rank, number in enumerate(numbers)}
        servers, workers = ([place[rank] for rank in some if rank in place] for some in (self.servers, self.workers))
        return Roles(tuple(servers), tuple(workers))


def roles(servers: str, ranks: int) -> Roles:
    """Local: the first ranks are servers, the rest workers; `colocated`: rank 0 serves, and all of them work.

    Raises:
        UsageError: no worker would remain, or the number is none.
    """
    if servers == COLOCATED:
        if ranks < 2:
            raise UsageError("--ps colocated needs two ranks or more: mpirun -np 2, or leave out --strategy ps")
        return Roles((0,), tuple(range(ranks)))
    if not servers.isdecimal() or int(servers) < 1:
        raise UsageError(f"--ps is {servers!r}: give the number of servers, or {COLOCATED}")
    count = int(servers)
    if count >= ranks:
        have = "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
        raise UsageError(
            f"--ps {count} leaves no worker, for there {have}: start at least {count + 1} (mpirun -np "
            f"{count + 1}), or take fewer servers"
        )
    return Roles(tuple(range(count)), tuple(range(count, ranks)))
