"""Runs a job, and where it fails runs it again, as often as that is allowed and may help."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable

from mpitrain.launch.request import Request
from mpitrain.launch.restart_policy import NextAttempt, Restarts
from mpitrain.launch.supervisor import ENDING_SIGNALS, TICK_SECONDS, Outcome, Signals
from mpitrain.launch.verdict import judge
from mpitrain.runtime.exit_codes import BY_SIGNAL

Attempt = Callable[[NextAttempt, int, list[int]], Outcome]


def run_with_restarts(attempt: Attempt, request: Request, restarts: Restarts, start_timeout_seconds: float) -> int:
    """Local: the exit code of the last attempt. For the main thread of a process that does nothing else.

    Args:
        attempt: starts what is asked for and waits for its end; it is given the number of the attempt, from 0, and the
            signals that have come meanwhile, to which it adds.
        request: the first one.
        restarts: decides what comes next.
        start_timeout_seconds: in which ranks had to meet.
    """
    again = NextAttempt(request, 0.0, resumes=False)
    pending: list[int] = []
    with Signals(pending) as wakeup:
        number = 0
        while True:
            outcome = attempt(again, number, pending)
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
                return BY_SIGNAL + stopped
            again, number = following, number + 1


def tell(text: str) -> None:
    """Local: a sentence for the user; nothing for an empty one."""
    if text:
        sys.stderr.write(f"mpitrain: {text}\n")
        sys.stderr.flush()


def _wait(wakeup: int, pending: list[int], seconds: float) -> int:
    """Local: the signal that ends the waiting, or 0. Others mean nothing to a job that does not run."""
    deadline = time.monotonic() + seconds
    while True:
        ending = [signum for signum in pending if signum in ENDING_SIGNALS]
        pending.clear()
        left = deadline - time.monotonic()
        if ending or left <= 0:
            return next(iter(ending), 0)
        select.select([wakeup], [], [], min(left, TICK_SECONDS))
