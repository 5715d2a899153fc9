"""The end of all ranks, and of those that do not end by themselves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from mpitrain.faults.exit_status import end_now
from mpitrain.faults.roster import Roster

ENDED_SECONDS = 2.5  # in which MPI ends the job; then this rank ends itself


class JobEnd:
    """Ends a job from any of its ranks.

    Args:
        abort: ends all of them with an exit code; may block.
    """

    def __init__(self, roster: Roster, abort: Callable[[int], None]) -> None:
        self._roster, self._abort = roster, abort

    def end_job(self, code: int, silent: Sequence[int]) -> None:
        """Local: as the hub: end all ranks."""
        self.end_soon(code, silent)
        threading.Thread(target=self._abort, args=(code,), name="mpitrain abort", daemon=True).start()

    def end_soon(self, code: int, silent: Sequence[int]) -> None:
        """Local: end this process if MPI does not, and those of this host that cannot end by themselves."""
        timer = threading.Timer(ENDED_SECONDS, functools.partial(self._end_now, code, silent))
        timer.daemon = True
        timer.start()

    def _end_now(self, code: int, silent: Sequence[int]) -> None:
        for seat in self._roster.neighbours(silent, self._roster.own):
            if seat.rank != self._roster.own:
                seat.process.kill()
        end_now(code)
