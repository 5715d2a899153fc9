"""Collectives in graphs of TensorFlow 1, which sessions run in any order: ranks agree on the next by name.

A session runs what is ready, many operations at once, and only what was asked for; nothing written into the graph
can order them without running more than that. So those that are waiting for their turn tell their names, and what
waits on all ranks is done, in the order in which rank 0 has it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpitrain.collectives.host import SESSION_ROUND
from mpitrain.errors import CollectiveError, MismatchError
from mpitrain.world.world import World

STALL_SECONDS = 60.0
ROUND_SECONDS = 1e-3


class _Waiting:
    """One call whose turn has not come."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.done.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Negotiation:
    """Takes the calls of this rank's sessions; one of the threads that wait does the rounds for all."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._idle_since = 0.0

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Collective, in any order: what `function` returns, once all ranks have come to the call of this name.

        Raises:
            MismatchError: on all ranks: none of what waits anywhere waits everywhere, for STALL_SECONDS.
        """
        own = _Waiting(function)
        with self._lock:
            if not self._waiting:
                self._idle_since = time.monotonic()
            self._waiting.setdefault(name, deque()).append(own)
        while not own.done.is_set():
            # The thread that does the rounds stops when its own call is done; then another of those that wait goes on.
            if self._turn.acquire(blocking=False):
                try:
                    if not own.done.is_set():
                        self._round()
                finally:
                    self._turn.release()
            else:
                own.done.wait(ROUND_SECONDS)
        return own.result()

    def _round(self) -> None:
        with self._lock:
            names = list(self._waiting)
        try:
            self._world.agreement.call(SESSION_ROUND, idle_ok=True)
            idle = time.monotonic() - self._idle_since
            everyone = self._world.communicator.all_gather_obj((names, idle))
            active = [theirs for theirs, _ in everyone if theirs is not None]  # the others have no data left
        except CollectiveError as error:
            self._fail(error)
            return
        # All ranks make this list of the same answers, so it has the same order everywhere.
        ready = [name for name in active[0] if all(name in theirs for theirs in active)]
        for name in ready:
            self._take(name).run()
        if ready:
            self._idle_since = time.monotonic()
        # Of all ranks, not of this one: they give up in the same round.
        elif max(seconds for _, seconds in everyone) > STALL_SECONDS:
            self._fail(MismatchError(_stalled([theirs or [] for theirs, _ in everyone], self._world)))
        else:
            time.sleep(ROUND_SECONDS)

    def _take(self, name: str) -> _Waiting:
        with self._lock:
            queue = self._waiting[name]
            taken = queue.popleft()
            if not queue:
                del self._waiting[name]
        return taken

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            calls = [call for queue in self._waiting.values() for call in queue]
            self._waiting.clear()
        for call in calls:
            call.fail(error)


def _stalled(everyone: list[list[str]], world: World) -> str:
    lines = [
        f"  rank {world.agreement.number(rank)} ({world.hosts[rank]}): {', '.join(names) or 'nothing'}"
        for rank, names in enumerate(everyone)
    ]
    return (
        f"for {STALL_SECONDS:g} s no collective was waiting on all ranks:\n"
        + "\n".join(lines)
        + "\nAll ranks must run the same collectives in a session, and its pool must have a thread for each "
        "(inter_op_parallelism_threads)."
    )


@functools.cache
def negotiation_of(world: World) -> Negotiation:
    """Local: the one negotiation of these ranks."""
    return Negotiation(world)
