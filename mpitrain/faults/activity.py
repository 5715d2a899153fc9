"""What this rank is doing, for the watchdog's thread to read.

Training writes it by plain assignment: no lock, no clock, no system call, so that it costs nothing beside
an exchange. The thread looks at it about twice a second, and finds out by itself how long nothing changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

Phase = Literal["start", "data", "compute", "exchange", "checkpoint", "evaluation", "callback", "end"]
PHASES: tuple[str, ...] = get_args(Phase)
# Long on one rank alone, and nothing wrong with it: loading data and tracing before the first update, saving,
# evaluating, and what stands after the training.
PATIENT_PHASES = ("start", "checkpoint", "evaluation", "end")
LOOKED_AT_BATCHES = 3


class Activity:
    """What one rank is doing.

    Attributes:
        phase: where in the program it is; while `inside` is set it waits for the others, too.
        updates: gradient updates finished.
        position: collectives entered. All ranks enter the same ones in the same order, so a rank with a lower
            position than another has not come to where the other is.
        moved: messages of collectives that have arrived, where a collective is made of many.
        inside: the collective it is in: a text, or a plan of buckets with the number of one; None outside.
        batches: checksums of the first batches, where they are seen.
        gradients: checksums of this rank's own gradients in the first updates.
    """

    __slots__ = ("batches", "gradients", "inside", "moved", "phase", "position", "updates")

    def __init__(self) -> None:
        self.phase: Phase = "start"
        self.updates = 0
        self.position = 0
        self.moved = 0
        self.inside: Any = None
        self.batches: list[int] = []
        self.gradients: list[int] = []

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Local: this rank is in `phase` until the context ends."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def describe(inside: Any) -> str:
    """Local: one line about the collective that `Activity.inside` names."""
    if isinstance(inside, tuple):
        plan, index = inside
        return str(plan.describe_bucket(index))
    return str(inside).split("\n")[0][:200]
