"""Ending a job on purpose, because a signal asked for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from mpitrain.faults.exit_status import end_now
from mpitrain.runtime import marks
from mpitrain.runtime.signals import StopSignals
from mpitrain.world.world import World

STOPPED = 85  # a checkpoint is written, the same command goes on from it (HTCondor's customary code for that)
INTERRUPTED = 130  # the same after Ctrl-C, as shells count it


class StoppedBySignal(SystemExit):
    """All ranks leave at the same step, with one exit code."""


def exit_code(number: int, saved: bool) -> int:
    """Local: what the job ends with.

    Args:
        number: of the signal.
        saved: a checkpoint of the last step is written.
    """
    if number == signal.SIGINT:
        return INTERRUPTED
    return STOPPED if saved else 128 + number


class StopRequest:
    """Listens to signals while a model is trained.

    Args:
        grace_seconds: from a signal to the end of this rank, whatever it does.
        on_request: called at once, on another thread.
    """

    def __init__(self, world: World, grace_seconds: float, on_request: Callable[[], None]) -> None:
        self.number = 0  # of the signal that came to this rank; 0 for none
        self._world, self._grace_seconds, self._on_request = world, grace_seconds, on_request
        self._code: int | None = None
        self._signals = StopSignals(grace_seconds, self._request, self._late)

    def begin(self) -> None:
        """Local: from now on signals are requests."""
        if self._signals.install():
            self._tell("graceful")

    def end(self) -> None:
        """Local: signals do what they did before."""
        self._signals.remove()
        self._tell("ordinary")

    def leave(self, number: int, saved: bool) -> StoppedBySignal:
        """Local: what to raise, on all ranks at once. If the end of the program takes too long, it is cut short."""
        self._code = exit_code(number, saved)
        self.end()
        return StoppedBySignal(self._code)

    def _tell(self, event: str) -> None:
        """Local: to `mpitrain run`, which asks by a signal that the launcher hands on instead of killing the ranks."""
        if self._world.is_root:
            marks.tell(event, self._world.rank)

    def _request(self, number: int) -> None:
        self.number = number
        self._on_request()

    def _late(self, number: int) -> None:
        """On a thread of its own: the main thread is somewhere and does not come."""
        if self._code is not None:
            end_now(self._code)
        rank, host = self._world.rank, self._world.hosts[self._world.rank]
        sys.stderr.write(
            f"mpitrain: {signal.Signals(number).name} came to rank {rank} ({host}), but the ranks did not come to the "
            f"end of a step and of a checkpoint within {self._grace_seconds:g} s; the job ends without one\n"
        )
        sys.stderr.flush()
        self._world.communicator.abort(exit_code(number, saved=False))


def where_from(numbers: Sequence[int], hosts: Sequence[str]) -> str:
    """Local: which signals came to which ranks, as in "SIGTERM came to ranks 0, 1 (node1)"."""
    texts = []
    for number in sorted({number for number in numbers if number}):
        ranks = [rank for rank, own in enumerate(numbers) if own == number]
        places = ", ".join(sorted({hosts[rank] for rank in ranks}))
        word = "rank" if len(ranks) == 1 else "ranks"
        texts.append(f"{signal.Signals(number).name} came to {word} {', '.join(map(str, ranks))} ({places})")
    return ", ".join(texts)
