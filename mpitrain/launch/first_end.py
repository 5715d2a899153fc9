"""Which rank of this host ended first, where a launcher kills the others before they can tell."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection, Sequence

from mpitrain.runtime.marks import Mark


class FirstEnd:
    """Looks at the processes of ranks; their launcher, not this process, is their parent.

    The kernel keeps descriptors that become readable in the order in which they do (`ep_poll_callback`), so it does not
    matter when they are asked: a launcher kills the others after the first has ended.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ranks: dict[int, int] = {}  # by descriptor
        self._seen = 0

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

    def rank(self, without: Collection[int]) -> int | None:
        """Local: the rank that ended first, of those that are looked at; None if none has."""
        ended = [self._ranks[descriptor] for descriptor, _ in self._epoll.poll(0, max(1, len(self._ranks)))]
        return next((rank for rank in ended if rank not in without), None)

    def close(self) -> None:
        """Local: close all descriptors."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._epoll.close()
