"""How the other ranks of this host ended: their launcher takes the answer away within milliseconds."""

from __future__ import annotations

import contextlib
import os
import time

from mpitrain.faults import processes
from mpitrain.faults.roster import Roster

ENDING_SECONDS = 0.03  # between the moment when a process closes its files and that when it is gone


class Neighbours:
    """Looks at the processes of ranks on this host."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        others = [seat for seat in roster.neighbours(range(len(roster.seats)), roster.own) if seat.rank != roster.own]
        found = {seat.rank: seat.process.open() for seat in others}
        # of all others, by rank, since those that die together may be all but one; readable once their process has
        # ended
        self.descriptors = {rank: descriptor for rank, descriptor in found.items() if descriptor is not None}
        # of ranks that have ended: status as of `os.waitpid`, and whether the kernel did it for want of memory; None
        # where it has so ended some process meanwhile, perhaps this one
        self.ended: dict[int, tuple[int, bool | None]] = {}
        self._out_of_memory_kills = processes.out_of_memory_kills()

    def is_here(self, rank: int) -> bool:
        """Local: whether a rank is on this host."""
        return self._roster.seats[rank].node == self._roster.seat.node

    def look(self, rank: int, ending: bool = False) -> bool:
        """Local: whether a rank is known to have ended; how is then in `ended`.

        `ending`: it is about to end, so wait a moment for it.
        """
        until = time.monotonic() + (ENDING_SECONDS if ending else 0.0)
        while rank not in self.ended and self.is_here(rank):
            status = self._roster.seats[rank].process.exit_status(self.descriptors.get(rank))
            if status is not None:
                self.ended[rank] = (status, self._for_memory(rank))
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(0.001)
        return rank in self.ended

    def _for_memory(self, rank: int) -> bool | None:
        if processes.out_of_memory_kills() <= self._out_of_memory_kills:
            return False
        return processes.killed_for_memory(self._roster.seats[rank].process)

    def is_gone(self, rank: int) -> bool:
        """Local: its process was on this host, and is there no more."""
        return self.is_here(rank) and self._roster.seats[rank].process.state() in (None, "Z", "X")

    def close(self) -> None:
        """Local: close the descriptors."""
        for descriptor in self.descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
