"""Ending a job on purpose, because a signal asked for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from mpitrain.faults import report
from mpitrain.faults.exit_status import end_now
from mpitrain.faults.report import Culprit, Fault
from mpitrain.runtime import marks, streams
from mpitrain.runtime.exit_codes import BY_SIGNAL, INTERRUPTED, STOPPED
from mpitrain.runtime.signals import StopSignals
from mpitrain.world.world import World


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
    return STOPPED if saved else BY_SIGNAL + number


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
        world, name = self._world, signal.Signals(number).name
        text = (
            f"got {name}, but the ranks did not come to the end of a step and of a checkpoint within "
            f"{self._grace_seconds:g} s"
        )
        culprit = Culprit(world.numbers[world.rank], world.hosts[world.rank], os.getpid())
        fault = Fault("signal", text, exit_code(number, saved=False), (culprit,), name)
        if world.watchdog is None or not world.watchdog.report(fault):
            streams.write_stderr(report.message(fault))
            report.record(fault, None, world.activity)
        world.communicator.abort(fault.exit_code)


def where_from(numbers: Sequence[int], hosts: Sequence[str]) -> str:
    """Local: which signals came to which ranks, as in "SIGTERM came to ranks 0, 1 (node1)"."""
    texts = []
    for number in sorted({number for number in numbers if number}):
        ranks = [rank for rank, own in enumerate(numbers) if own == number]
        places = ", ".join(sorted({hosts[rank] for rank in ranks}))
        word = "rank" if len(ranks) == 1 else "ranks"
        texts.append(f"{signal.Signals(number).name} came to {word} {', '.join(map(str, ranks))} ({places})")
    return ", ".join(texts)
