"""What a rank says of itself to the hub."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mpitrain.faults import processes, stacks
from mpitrain.faults.activity import LOOKED_AT_BATCHES, Activity, describe
from mpitrain.faults.processes import Process
from mpitrain.faults.wire import Message


class Heartbeat:
    """What this rank is doing, in messages."""

    def __init__(self, activity: Activity, beat_seconds: float) -> None:
        self._activity, self._beat_seconds = activity, beat_seconds
        self._mark: tuple[int, int, bool] = (-1, 0, False)
        self._since = 0.0
        self._sums = 0

    def restart(self) -> None:
        """Local: another rank is the hub now, which has heard nothing so far."""
        self._sums = 0

    def beat(self, now: float) -> list[Message]:
        """Local: what is said again and again; and once what the first batches were, as soon as that is known."""
        activity = self._activity
        messages: list[Message] = [
            {
                "is": "beat",
                "position": activity.position,
                "waiting": self._waiting(now),
                "updates": activity.updates,
                "phase": activity.phase,
                "resident": processes.resident_bytes(),
            }
        ]
        sums = len(activity.batches) + len(activity.gradients)
        if sums > self._sums and max(len(activity.batches), len(activity.gradients)) >= LOOKED_AT_BATCHES:
            self._sums = sums
            messages.append({"is": "data", "batches": activity.batches[:], "gradients": activity.gradients[:]})
        return messages

    def state(self, question: int, look: Sequence[Sequence[int]], now: float) -> Message:
        """Local: the answer to a question of the hub, on the watchdog's thread.

        `look` gives the ranks of this host that do not answer: number, process, and when that was started.
        """
        activity = self._activity
        inside, waiting = activity.inside, self._waiting(now)
        found = stacks.python_stacks(skip=[threading.get_ident()])
        phase = "exchange" if inside is not None and activity.phase != "end" else stacks.phase_of(activity.phase, found)
        return {
            "is": "state",
            "question": question,
            "position": activity.position,
            "waiting": waiting,
            "inside": None if inside is None else describe(inside),
            "phase": phase,
            "updates": activity.updates,
            "resident": processes.resident_bytes(),
            "stacks": [(stack.thread, stacks.shortened(stack)) for stack in found],
            "neighbours": {rank: Process(pid, started).state() for rank, pid, started in look},
        }

    def _waiting(self, now: float) -> float:
        """Seconds since this rank entered the collective it is in; never less than they are."""
        activity = self._activity
        mark = (activity.position, activity.moved, activity.inside is not None)
        if mark != self._mark:
            # It may have entered just after the last look: rather too long than too short.
            self._mark, self._since = mark, now - self._beat_seconds
        return round(now - self._since, 2) if mark[2] else 0.0
