"""Where the time of the exchange went, on one rank."""

from __future__ import annotations

import numpy as np

from mpitrain.runtime.words import Word


class Statistics:
    """Counted by Python and by machine code.

    Attributes:
        updates: gradient updates done.
        waiting: seconds until the slowest rank had come.
        exchange: seconds in which buckets were exchanged.
        samples_global: samples of all ranks behind all updates.
    """

    updates = Word(0, int)
    waiting = Word(1, float)
    exchange = Word(2, float)
    samples_global = Word(3, float)

    def __init__(self) -> None:
        self.words = np.zeros(4, np.float64)
