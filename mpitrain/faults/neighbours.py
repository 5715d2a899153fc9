"""How the other ranks of this host ended: their launcher takes the answer away within milliseconds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

from mpitrain.faults import processes
from mpitrain.faults.roster import Roster

ENDING_SECONDS = 0.03  # between the moment when a process closes its files and that when it is gone


class Neighbours:
    """Looks at the processes of ranks on this host.

    Args:
        roster: all ranks.

    Attributes:
        descriptors: of those that this rank looks at, by rank; readable once their process has ended.
        ended: of ranks that have ended: status as of `os.waitpid`, and whether the kernel had no memory left.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.descriptors: dict[int, int] = {}
        self.ended: dict[int, tuple[int, bool]] = {}
        self._out_of_memory_kills = processes.out_of_memory_kills()

    def watch(self, lost: Collection[int] = ()) -> dict[int, int]:
        """Local: look at the ranks that this one has to look at, as far as it does not yet; the new descriptors.

        Args:
            lost: ranks that the job goes on without.
        """
        seats = [seat for seat in self._roster.watched(lost) if seat.rank not in self.descriptors]
        found = {seat.rank: seat.process.open() for seat in seats}
        new = {rank: descriptor for rank, descriptor in found.items() if descriptor is not None}
        self.descriptors |= new
        return new

    def is_here(self, rank: int) -> bool:
        """Local: whether a rank is on this host."""
        return self._roster.seats[rank].node == self._roster.seat.node

    def look(self, rank: int, ending: bool = False) -> bool:
        """Local: whether a rank is known to have ended; how is then in `ended`.

        Args:
            rank: of any host.
            ending: it is about to end, so wait a moment for it.
        """
        until = time.monotonic() + (ENDING_SECONDS if ending else 0.0)
        while rank not in self.ended and self.is_here(rank):
            status = self._roster.seats[rank].process.exit_status(self.descriptors.get(rank))
            if status is not None:
                self.ended[rank] = (status, processes.out_of_memory_kills() > self._out_of_memory_kills)
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(0.001)
        return rank in self.ended

    def is_gone(self, rank: int) -> bool:
        """Local: its process was on this host, and is there no more."""
        return self.is_here(rank) and self._roster.seats[rank].process.state() in (None, "Z", "X")

    def close(self) -> None:
        """Local: close the descriptors."""
        for descriptor in self.descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
