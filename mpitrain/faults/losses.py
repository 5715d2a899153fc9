"""Which deaths the others survive, and of which they have been told."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpitrain.faults.options import SHRINK, FaultOptions

# After which a rank that becomes the hub has nothing to tell of a loss: the one before has.
TOLD_SECONDS = 3.0


class Losses:
    """Ranks that were lost while the others go on.

    Args:
        options: whether they do.
    """

    def __init__(self, options: FaultOptions) -> None:
        self._survived = options.on_failure == SHRINK
        self._since: dict[int, float] = {}

    def note(self, ranks: Sequence[int], now: float) -> None:
        """Local: the job goes on without these."""
        for rank in ranks:
            self._since.setdefault(rank, now)

    def survives(self, status: int | None) -> bool:
        """Local: whether the others go on; Open MPI ends a job whose rank has ended with an exit code.

        Args:
            status: of the dead process, as of `os.waitpid`, where it is known.
        """
        return self._survived and not (status is not None and os.WIFEXITED(status))

    def is_told(self, rank: int, now: float) -> bool:
        """Local: whether this loss is an old one."""
        return rank in self._since and now - self._since[rank] > TOLD_SECONDS
