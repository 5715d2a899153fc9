"""What a rank wants all others to know at the end of a step: a checkpoint is due, a signal has come.

It stands in the header that precedes each exchange of gradients (`Agreement.request`), so that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.strategies.strategy import strategy_of
from mpitrain.world.agreement import Agreed
from mpitrain.world.world import World

SAVE = 1  # in a request; the number of a signal stands in the bits above


class Requests:
    """The requests of all ranks.

    Args:
        is_busy: whether a checkpoint is being written, so that another would have to wait.
        signal: the number of the signal that has come to this rank; 0 for none.

    Attributes:
        save: this rank wants a checkpoint.
        in_step: all ranks come to the end of each step.
    """

    def __init__(self, world: World, is_busy: Callable[[], bool], signal: Callable[[], int]) -> None:
        self._world, self._is_busy, self._signal = world, is_busy, signal
        self.save = self.in_step = False
        self._seen: Agreed | None = None

    def begin(self, in_step: bool) -> None:
        """Local: a training begins; what an earlier one has agreed on is none of its requests."""
        self.in_step, self._seen = in_step, strategy_of(self._world).agreed

    def tell(self) -> None:
        """Local: into the next header. Called on two threads, always with both wishes."""
        save = SAVE if self.save and not self._is_busy() else 0
        self._world.agreement.request = save | self._signal() << 1

    def clear(self) -> None:
        """Local: nothing is wanted any more."""
        self._world.agreement.request = 0

    def after_step(self) -> list[int]:
        """Local: what all ranks wanted in the header of this step, if all of them have come to its end."""
        if not self._world.exchanges:
            return [self._world.agreement.request]
        agreed = strategy_of(self._world).agreed
        if agreed is None or agreed is self._seen or not self.in_step or not agreed.active.all():
            return []  # ranks without data stand elsewhere: the end of the epoch is near
        self._seen = agreed
        return [int(request) for request in agreed.requests]

    def now(self, when: str) -> list[int]:
        """Collective: what all ranks want."""
        self.tell()
        return [int(request) for request in self._world.agreement.call(f"{when}, with checkpoints").requests]
