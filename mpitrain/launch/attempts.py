"""Runs a job, and where it fails runs it again, as often as that is allowed and may help."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable

from mpitrain.launch.request import Request
from mpitrain.launch.restarts import Again, Restarts
from mpitrain.launch.supervisor import ENDING_SIGNALS, Outcome, Signals
from mpitrain.launch.verdict import judge

Attempt = Callable[[Request, int, bool], Outcome]


def run_attempts(attempt: Attempt, request: Request, restarts: Restarts, start_timeout_seconds: float) -> int:
    """Local: the exit code of the last attempt. For the main thread of a process that does nothing else.

    Args:
        attempt: starts what is asked for and waits for its end; it is given the number of the attempt, from 0, and
            whether checkpoints of an earlier one are to be gone on from.
        request: the first one.
        restarts: decides what comes next.
        start_timeout_seconds: in which ranks had to meet.
    """
    again = Again(request, 0.0, resumes=False)
    pending: list[int] = []
    with Signals(pending) as wakeup:
        number = 0
        while True:
            outcome = attempt(again.request, number, again.resumes)
            code, said = judge(outcome, again.request, start_timeout_seconds)
            following, sentence = restarts.after(outcome, code, again.request)
            if outcome.tail[-1:] not in (b"", b"\n"):
                sys.stderr.write("\n")  # launchers leave lines unfinished
            for text in [*said, sentence]:
                tell(text)
            if following is None:
                return code
            stopped = _wait(wakeup, pending, following.delay_seconds)
            if stopped:
                tell("not started again: it was stopped by a signal")
                return 128 + stopped
            again, number = following, number + 1


def tell(text: str) -> None:
    """Local: a sentence for the user; nothing for an empty one."""
    if text:
        sys.stderr.write(f"mpitrain: {text}\n")
        sys.stderr.flush()


def _wait(wakeup: int, pending: list[int], seconds: float) -> int:
    """Local: the signal that ends the waiting, or 0."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        for signum in pending:
            if signum in ENDING_SIGNALS:
                return signum
        pending.clear()
        select.select([wakeup], [], [], min(left, 0.25))
    return 0
