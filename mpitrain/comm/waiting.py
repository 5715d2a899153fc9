"""Waiting for operations of MPI, without taking the processor from those who have work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

SPIN_SECONDS = 3e-4
LONGEST_SLEEP_SECONDS = 2e-4
# Groups of ranks are left in threads of their own, and operations of a graph run in any. MPI lets several threads in at
# once; it is asked for no more than one at a time all the same, where a call returns at once.
INSIDE = threading.RLock()


def poll(start: Callable[..., Any], *arguments: Any) -> None:
    """Local: start an operation of MPI, and wait for it as `wait` does."""
    with INSIDE:
        request = start(*arguments)
    wait(request)


def wait(request: Any) -> None:
    """Local: wait for an MPI request without taking the processor from those who have work.

    MPI waits by polling. Where ranks share cores, the rank that waits would take the time of the
    rank it waits for. So every test but the first gives way, and after a while this sleeps, never
    longer than an eighth of the time already waited: the delay stays within 12 %.
    """
    if done(request):
        return
    start = time.perf_counter()
    while not done(request):
        waited = time.perf_counter() - start
        if waited < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(LONGEST_SLEEP_SECONDS, waited / 8))


def done(request: Any) -> bool:
    """Local: whether an MPI request is; drives progress."""
    with INSIDE:
        return bool(request.Test())
