"""One exchange for all optimizers of a job: means, joining of ranks that ran out of data, statistics."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.collectives import host
from mpitrain.errors import CollectiveError
from mpitrain.faults.options import SHRINK
from mpitrain.reduction.buckets import BucketPlan
from mpitrain.reduction.reducer import Reducer, Statistics, zeros
from mpitrain.strategies import replicas
from mpitrain.strategies.weighting import are_added_up, current_samples
from mpitrain.world.agreement import Agreed
from mpitrain.world.calls import Call
from mpitrain.world.start import current_world
from mpitrain.world.world import World


@dataclass(eq=False)
class EmptyUpdate:
    """How a rank without data takes part in one kind of update.

    Attributes:
        run: collective, makes the update.
        samples: how many samples this rank has accumulated and not yet contributed.
    """

    run: Callable[[], None]
    samples: Callable[[], float]


class Exchange:
    """Gradient exchange of one job.

    Attributes:
        takes_part: of each loop under way, the innermost last, a function that says how a rank without data takes
            part in such a call of the others, or None.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.reducer = Reducer(world.communicator, world.agreement, world.all_reduce)
        self.reducer.finite.action = world.faults.non_finite
        # No part of an update is made before all of its exchange has succeeded: ranks may be lost meanwhile.
        self.whole_updates = world.faults.on_failure == SHRINK
        self._hosts = world.topology.node_count  # at the start: all ranks plan alike, whenever they do
        world.on_shrink.append(self.reducer.begin_anew)
        self._numbers = itertools.count()
        # Weak: an optimizer, and with it its variables, goes when the program drops it.
        self._empty_updates: weakref.WeakValueDictionary[int, EmptyUpdate] = weakref.WeakValueDictionary()
        self._plans: dict[int, BucketPlan] = {}
        self._synchronized: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.takes_part: list[Callable[[Call], Callable[[Agreed], None] | None]] = []

    @property
    def latest_samples(self) -> float:
        """Samples of this rank in the latest update; 1 before the first."""
        agreed = self.reducer.agreed
        return 1.0 if agreed is None else float(agreed.samples[self.world.rank])

    @property
    def in_step(self) -> bool:
        """All ranks make each update together."""
        return True

    @property
    def statistics(self) -> Statistics:
        """Where the time went, on this rank."""
        return self.reducer.statistics

    def count_from(self, updates: int) -> None:
        """Local: so many updates are made, on all ranks."""
        self.world.activity.updates = self.statistics.updates = updates

    def catch_up(self) -> None:
        """Collective: after the loss of ranks, the variables become those of the servers, where there are any."""

    def done(self) -> dict[int, int]:
        """Local: of ranks, by their numbers in the job, how many gradients were used or dropped, if servers count."""
        return {}

    def next_number(self) -> int:
        """Local: 0, 1, 2, ...: tells optimizers apart, whose variables may have equal names."""
        return next(self._numbers)

    def mean(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        title: str,
        synchronize: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Collective: the mean of gradients over the samples of all ranks, or their sum; None stays None.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: of which they are the gradients.
            title: whose gradients these are, the same on all ranks.
            synchronize: see `Reducer.exchange`.
        """
        present = [position for position, gradient in enumerate(gradients) if gradient is not None]
        if self.world.size == 1 or not present:
            return list(gradients)
        from mpitrain.reduction.graph import mean_gradients

        own = [gradients[position] for position in present]
        plan = self.plan(own, [variables[position] for position in present], title)
        self._plans.setdefault(plan.call.signature, plan)
        result: list[Any] = list(gradients)
        means = mean_gradients(self.reducer, plan, own, current_samples(), synchronize)
        for position, mean in zip(present, means, strict=True):
            result[position] = mean
        return result

    def plan(self, gradients: Sequence[Any], variables: Sequence[Any], title: str) -> BucketPlan:
        """Local: how these gradients, of which none is None, are exchanged."""
        from mpitrain.reduction.graph import plan_of

        return plan_of(gradients, variables, title, self._hosts, self.half, are_added_up())

    def plan_update(self, gradients: Sequence[Any], variables: Sequence[Any], title: str) -> BucketPlan:
        """Local: what `mean` makes of these gradients, of which none is None."""
        return self.plan(gradients, variables, title)

    @property
    def half(self) -> bool:
        """Half precisions are summed as they are."""
        return False

    def is_shared(self, variable: Any) -> bool:
        """Local: whether a variable is the same on all ranks."""
        return True

    def synchronize_once(self, variables: Sequence[Any]) -> bool:
        """Collective: rank 0's values for variables that were not given here before; True if any differed.

        Variables without a value, which exist only in the graph being traced, are left as they are.
        """
        shared = [v for v in variables if hasattr(v, "assign") and self.is_shared(v)]
        new = [v for v in shared if self._synchronized.get(id(v)) is not v]
        self._synchronized.update({id(v): v for v in new})
        valued = [v for v in new if replicas.has_value(v)]
        return bool(valued) and replicas.synchronize(valued, world=self.world)

    def knows(self, call: Call) -> bool:
        """Local: whether this rank can make that update without data."""
        return call.signature in self._empty_updates

    def register_empty_update(self, call: Call, update: EmptyUpdate) -> None:
        """Local: how this rank makes that update with nothing of its own; kept by a weak reference."""
        self._empty_updates[call.signature] = update

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
        updates = 0
        while self.world.size > 1:
            agreed = self.world.agreement.idle(finished, functools.partial(self._pending, finished, collectives))
            if agreed.call is None:
                if not finished or agreed.finished:
                    break
            elif agreed.possible:
                self._contribute_nothing(agreed, agreed.call)
                updates += 1
            elif not finished:
                raise CollectiveError(
                    f"rank {self.world.rank} ({self.world.hosts[self.world.rank]}) has no data left while others go on "
                    "with an operation in which some rank without data cannot take part. Give every rank at least "
                    "one batch, and update with a DistributedOptimizer."
                )
        return updates

    def _pending(self, finished: bool, collectives: bool, call: Call) -> float | None:
        update = self._empty_updates.get(call.signature)
        if update is not None:
            return update.samples()
        if not finished and self._part_in(call) is not None:
            return 0.0
        known = finished and call.signature in self._plans
        collectives = collectives or (isinstance(call, host.CollectiveCall) and call.name == host.IN_STEP)
        return 0.0 if known or (collectives and host.without_data(self.world, call)) else None

    def _part_in(self, call: Call) -> Callable[[Agreed], None] | None:
        return self.takes_part[-1](call) if self.takes_part else None

    def _contribute_nothing(self, agreed: Agreed, call: Call) -> None:
        """Collective: one update of the others, or what else they do."""
        part = self._part_in(call)
        if part is not None:
            part(agreed)
            return
        collective = host.without_data(self.world, call)
        if collective is not None:
            collective()
            return
        update = self._empty_updates.get(call.signature)
        self.reducer.contribute_nothing(agreed)
        if update is not None:
            update.run()
            return
        # Of a tape, or of an optimizer that is gone: nothing here has to follow.
        plan = self._plans[call.signature]
        for index, bucket in enumerate(plan.buckets):
            self.reducer.exchange(plan, index, zeros(plan, bucket), 0.0)


@functools.cache
def exchange_of(world: World) -> Exchange:
    """Local: the one exchange of a job."""
    if world.parameter_server is None:
        exchange = Exchange(world)
    else:
        from mpitrain.strategies.parameter_server.served import ServedExchange

        exchange = ServedExchange(world)
    world.leave = functools.partial(exchange.join, finished=True)
    return exchange


def current_exchange(world: World | None = None) -> Exchange:
    """Local: the exchange of `world`, or of the current one."""
    return exchange_of(world or current_world())
