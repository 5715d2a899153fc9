"""All ranks of a job as the watchdog knows them: hosts, processes, addresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpitrain.faults.handshake import first_that_answers
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit
from mpitrain.faults.wire import Link


@dataclass(frozen=True)
class Seat:
    """One rank."""

    rank: int  # its number
    host: str  # name of its host
    node: int  # number of its host
    process: Process  # its process there
    places: tuple[tuple[str, int], ...]  # addresses and ports where it listens

    def as_culprit(self) -> Culprit:
        """For the record of a fault."""
        return Culprit(self.rank, self.host, self.process.pid)


@dataclass(frozen=True)
class Roster:
    """The ranks of a job."""

    own: int  # this rank
    seats: tuple[Seat, ...]  # all ranks
    token: str  # what only they know

    @property
    def seat(self) -> Seat:
        """This rank's."""
        return self.seats[self.own]

    def candidates(self, lost: Collection[int] = ()) -> list[int]:
        """The ranks that may be the hub for this one, the first that answers is.

        Rank 0, and some others for the case that it does not answer; at last this rank itself. Lost ranks are those
        that the job goes on without; others take their places.
        """
        nodes = [[rank for rank in ranks if rank not in lost] for ranks in self._nodes()]
        first_of_nodes = [ranks[0] for ranks in nodes if ranks]
        first = [seat.rank for seat in self.seats if seat.rank not in lost][:4]
        wanted = {*first, *first_of_nodes[:3], *nodes[self.seat.node][:1], self.own}
        return sorted(rank for rank in wanted if rank <= self.own)

    def find_hub(
        self, ranks: Sequence[int], left: dict[int, str], timeout_seconds: float
    ) -> tuple[int, Link, dict[int, str]] | None:
        """Local: the first rank that answers, and the link to it. Blocks.

        Args:
            ranks: in the order in which they are tried.
            left: those that have not answered, and why; more are added.
            timeout_seconds: for each address.
        """
        for rank in ranks:
            hello = {"left": {str(other): why for other, why in left.items() if other < rank}}
            found = first_that_answers(self.seats[rank].places, self.own, rank, hello, self.token, timeout_seconds)
            if isinstance(found, Link):
                return rank, found, left
            left[rank] = found
        return None

    def neighbours(self, ranks: Sequence[int], of: int) -> list[Seat]:
        """Those of `ranks` that are on the host of rank `of`."""
        return [self.seats[rank] for rank in ranks if self.seats[rank].node == self.seats[of].node]

    def _nodes(self) -> list[list[int]]:
        nodes: dict[int, list[int]] = {}
        for seat in self.seats:
            nodes.setdefault(seat.node, []).append(seat.rank)
        return [nodes[node] for node in sorted(nodes)]
