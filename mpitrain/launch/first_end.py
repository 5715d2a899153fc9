"""Which rank ended by itself, where a launcher kills the others before they can tell."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpitrain.faults.processes import exit_status_of, how_it_ended
from mpitrain.runtime.marks import Mark

KILLED = int(signal.SIGKILL)  # as of `os.waitpid`


@dataclass(frozen=True)
class End:
    """The end of one rank."""

    rank: int
    how: str  # in words, where it has ended by itself, and the launcher has killed all others; else empty


class FirstEnd:
    """Looks at the processes of ranks; their launcher, not this process, is their parent.

    The order in which they are gone does not tell the cause: a launcher kills the others when a connection of the first
    is closed, which the kernel does before the process is gone, and on a busy machine one that is killed may overtake
    it (seen in 3 of 15 jobs). Exit codes tell, since the launcher kills with SIGKILL; kernels before 6.15 keep none.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ranks: dict[int, int] = {}  # by descriptor
        self._seen = 0
        self._in_order = True  # the kernel keeps descriptors in the order of the ends (`ep_poll_callback`)

    def watch(self, marks: Sequence[Mark]) -> None:
        """Local: look at the ranks of this host that have begun.

        Args:
            marks: all that were told; those of earlier calls stand first.
        """
        host = os.uname().nodename
        new, self._seen = marks[self._seen :], len(marks)
        for mark in new:
            if mark.event == "begun" and mark.host == host and mark.detail.isdecimal():
                with contextlib.suppress(OSError, AttributeError):  # it has ended; or an old kernel, an old Python
                    descriptor = os.pidfd_open(int(mark.detail))
                    self._ranks[descriptor] = mark.rank
                    self._epoll.register(descriptor, select.EPOLLIN)
                    # Those that have ended by now stand in the order in which they were registered.
                    self._in_order = self._in_order and not self._epoll.poll(0)

    def of(self, ranks: int, without: Collection[int]) -> End | None:
        """Local: the end of the rank that ended by itself, or else was gone first; None where neither is known.

        Args:
            ranks: of the job. Of one that is not looked at, since it is on another host or never began, or was gone
                before, nothing is known.
            without: those that were to end.
        """
        if len(self._ranks) < ranks:
            return None
        ended = [descriptor for descriptor, _ in self._epoll.poll(0, max(1, len(self._ranks)))]
        found = {self._ranks[one]: exit_status_of(one) for one in ended if self._ranks[one] not in without}
        alone = [(rank, status) for rank, status in found.items() if status is not None and status != KILLED]
        if len(alone) == 1:
            return End(alone[0][0], how_it_ended(alone[0][1])[0])
        return End(next(iter(found)), "") if found and self._in_order and not alone else None

    def close(self) -> None:
        """Local: close all descriptors."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._epoll.close()
