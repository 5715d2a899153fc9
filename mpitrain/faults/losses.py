"""Which deaths the others survive, and of which they have been told."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence

from mpitrain.faults import report
from mpitrain.faults.options import SHRINK, FaultOptions
from mpitrain.faults.report import Fault
from mpitrain.faults.wire import Message

# After which a rank that becomes the hub has nothing to tell of a loss: the one before has, even if this one has not
# heard of it.
TOLD_SECONDS = 3.0
# After which a lost rank whose connection has not ended is one whose host, or the way there, is gone.
SILENT_SECONDS = 1.0


class ShrinkRecord:
    """Ranks that were lost while the others go on."""

    def __init__(self, options: FaultOptions) -> None:
        self._options = options
        self._since: dict[int, float] = {}
        self._vital: frozenset[int] = frozenset()
        self._told: set[int] = set()
        self.at_end = False  # of the job: what is not told now never is

    def require(self, ranks: Sequence[int]) -> None:
        """Local: the others do not go on without any of these."""
        self._vital = frozenset(ranks)

    @property
    def lost(self) -> Collection[int]:
        """Ranks that the job goes on without."""
        return self._since.keys()

    def note(self, ranks: Sequence[int], now: float) -> None:
        """Local: the job goes on without these."""
        for rank in ranks:
            self._since.setdefault(rank, now)

    def untold(self, own: int, known: Collection[int], now: float) -> dict[int, float]:
        """Local: those that the job has gone on without for a while, or to its end, and since when.

        Args:
            own: this rank; the first that is left tells of all, others of those that they know.
            known: ranks that this one has heard of as the hub.
            now: the time.
        """
        leads = all(rank in self._since for rank in range(own))
        since = {rank: moment for rank, moment in self._since.items() if leads or rank in known}
        return {rank: moment for rank, moment in since.items() if self.at_end or now - moment >= SILENT_SECONDS}

    def is_allowed(self, rank: int, status: int | None) -> bool:
        """Local: whether the others go on; Open MPI ends a job whose rank has ended with an exit code."""
        exited = status is not None and os.WIFEXITED(status)
        return self._options.on_failure == SHRINK and rank not in self._vital and not exited

    @property
    def answer(self) -> Message:
        """The hub's answer to each heartbeat: what was told, so that no rank that is the hub later tells it again."""
        return {"is": "ok", "lost": sorted(self._told)}

    def hear(self, answer: Message) -> None:
        """Local: what the hub has told."""
        self._told.update(map(int, answer["lost"]))

    def tell(self, death: Fault, now: float, write: Callable[[str], None], tell_all: Callable[[Message], None]) -> None:
        """Local: tell of a death that the others survive, unless another rank has told it when it was the hub.

        Args:
            death: of one rank.
            now: the time.
            write: prints a text.
            tell_all: says to all ranks that it was told.
        """
        rank = death.culprits[0].rank
        if rank in self._told or now - self._since.get(rank, now) > TOLD_SECONDS:
            return
        self._told.add(rank)
        loss = dataclasses.replace(death, kind="loss", exit_code=0)
        write(report.message(loss))
        tell_all(self.answer)
        if self._options.failure_report:
            report.write(self._options.failure_report, loss)
