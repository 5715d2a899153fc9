"""How a rank that has run out of data takes part in what the others do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from mpitrain.collectives import host
from mpitrain.errors import CollectiveError
from mpitrain.world.agreement import Agreed
from mpitrain.world.calls import Call
from mpitrain.world.world import World

Way = Callable[[Agreed], object]


@dataclass(eq=False)
class Part:
    """How a rank without data takes part in one kind of update."""

    run: Callable[[], object]  # collective, makes the update
    samples: Callable[[], float] = lambda: 0.0  # how many samples this rank has accumulated and not yet contributed


class Joining:
    """The ways in which this rank can take part.

    Args:
        begin: local, called before an update of the others is made here, with what its header said: it is exchanged
            already, so the update that follows has none.
    """

    def __init__(self, world: World, begin: Way = lambda agreed: None) -> None:
        self._world, self._begin = world, begin
        # of each loop under way, the innermost last, a function that says how a rank without data takes part in such a
        # call of the others, or None
        self.takes_part: list[Callable[[Call], Way | None]] = []
        # Weak: an optimizer, and with it its variables, goes when the program drops it.
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._at_end: dict[int, Part] = {}

    def register(self, call: Call, part: Part | None, at_end: Part) -> None:
        """Local: how this rank makes an update with nothing of its own.

        Args:
            call: all of whose ranks make it.
            part: referred to weakly; one that is registered already stays.
            at_end: at the end of the program, where there is no part, or none any more.
        """
        self._at_end.setdefault(call.signature, at_end)
        if part is not None:
            self._parts[call.signature] = part

    def knows(self, call: Call) -> bool:
        """Local: whether this rank can make that update before the end of the program."""
        return call.signature in self._parts

    def join(self, finished: bool = False, collectives: bool = False) -> int:
        """Collective: take part in the updates of ranks that still have data, until all have joined.

        Args:
            finished: this rank is at the end of its program and leaves only with all the others.
            collectives: take part in all-reduce (with zeros, or what else changes nothing) and all-gather (with no
                rows) as well, where a mean still divides by the number of all ranks.

        Returns:
            How many updates of the others this rank took part in.

        Raises:
            CollectiveError: the others do something in which this rank cannot take part.
        """
        world, updates = self._world, 0
        ways: list[Way] = []

        def able(call: Call) -> float | None:
            samples, way = self._way(call, finished, collectives)
            ways[:] = [] if way is None else [way]
            return samples

        while world.size > 1:
            agreed = world.agreement.idle(finished, able)
            if agreed.call is None:
                if not finished or agreed.finished:
                    break
            elif agreed.possible:
                ways[0](agreed)
                updates += 1
            elif not finished:
                raise CollectiveError(
                    f"rank {world.rank} ({world.hosts[world.rank]}) has no data left while others go on "
                    "with an operation in which some rank without data cannot take part. Give every rank at least "
                    "one batch, and update with a DistributedOptimizer."
                )
        return updates

    def _way(self, call: Call, finished: bool, collectives: bool) -> tuple[float | None, Way | None]:
        """Local: of how many samples this rank still has gradients, and what it does; None where it can do nothing."""
        part = self._parts.get(call.signature) or (self._at_end.get(call.signature) if finished else None)
        if part is not None:
            return part.samples(), functools.partial(self._make, part)
        # The innermost loop first: an evaluation in a `fit` has batches of its own.
        way = self.takes_part[-1](call) if self.takes_part and not finished else None
        if way is None and (collectives or (isinstance(call, host.CollectiveCall) and call.name == host.IN_STEP)):
            collective = host.without_data(self._world, call)
            way = None if collective is None else lambda agreed: collective()
        return None if way is None else 0.0, way

    def _make(self, part: Part, agreed: Agreed) -> None:
        """Collective: an update of the others."""
        self._begin(agreed)
        part.run()
