"""Gradients become their mean over all ranks, or their sum, and all ranks apply that alike."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.faults.options import SHRINK
from mpitrain.reduction.buckets import BucketPlan
from mpitrain.reduction.reducer import Reducer, zeros
from mpitrain.strategies.joining import Joining, Part
from mpitrain.strategies.strategy import Strategy, Update
from mpitrain.strategies.weighting import are_added_up, current_samples
from mpitrain.world.agreement import Agreed
from mpitrain.world.world import World

MOST_PLANS = 256


@dataclass(frozen=True)
class _Planned:
    """A plan, and the variables it was made for."""

    plan: BucketPlan
    variables: tuple[weakref.ref[Any], ...]


class AllReduce(Strategy):
    """The mean over the samples of all ranks, in buckets, while the backward pass of earlier layers goes on."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.reducer = Reducer(world.communicator, world.agreement, world.all_reduce)
        self.reducer.finite.action = self.finite.action
        self.finite, self.statistics = self.reducer.finite, self.reducer.statistics
        self.joining = Joining(world, self.reducer.contribute_nothing)
        # No part of an update is made before all of its exchange has succeeded: ranks may be lost meanwhile.
        self._whole_updates = world.faults.on_failure == SHRINK
        self._hosts = world.topology.node_count  # at the start: all ranks plan alike, whenever they do
        self._plans: dict[tuple[Any, ...], _Planned] = {}
        self._not_in_xla: list[str | None] | None = None  # why a rank cannot exchange there; None: not asked yet
        self.engine: str | None = None  # of updates that are traced from now on; None for the fastest

    @property
    def exchanges(self) -> bool:
        return self.world.size > 1

    @property
    def agreed(self) -> Agreed | None:
        return self.reducer.agreed

    def join(self, collectives: bool = False) -> int:
        return self.joining.join(collectives=collectives)

    def leave(self) -> None:
        self.joining.join(finished=True)

    def on_shrink(self) -> None:
        self.reducer.begin_anew()

    def update(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> Any:
        """Collective: the mean, or the sum, of the gradients is applied; None stays None."""
        own, kept = _present(gradients, variables)
        if self.world.size == 1 or not own:
            return update.apply(gradients, variables)
        import tensorflow as tf

        from mpitrain.collectives.conversion import compiled_function
        from mpitrain.collectives.registry import engine_of
        from mpitrain.reduction.graph import mean_gradients

        compiled = not tf.executing_eagerly() and compiled_function() is not None
        if compiled:
            own = self._for_xla(own, kept, update)
        synchronize = update.synchronize and functools.partial(update.synchronize, variables)
        if synchronize is not None and not tf.executing_eagerly():
            synchronize()  # what the graph reads may be read before its first exchange assigns it
        plan = self._plan(own, kept, update, compiled)
        found = mean_gradients(
            engine_of(self.world, self.engine), self.reducer, plan, own, current_samples(), synchronize
        )
        rest = iter(found)
        means = [None if gradient is None else next(rest) for gradient in gradients]
        # Variables get their values while later buckets are still on their way.
        if not self._whole_updates:
            return update.apply(means, variables)
        with tf.control_dependencies([m.values if isinstance(m, tf.IndexedSlices) else m for m in found]):
            return update.apply(means, variables)

    def expect(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> None:
        own, kept = _present(gradients, variables)
        if self.world.size > 1 and own:
            self._plan(own, kept, update)

    def xla_obstacles(self) -> Sequence[str | None]:
        from mpitrain.collectives.registry import engine_of

        if self._not_in_xla is None:
            self.world.agreement.call("whether XLA can compile the exchange")
            own = engine_of(self.world).capabilities.not_in_xla
            self._not_in_xla = self.world.communicator.all_gather_obj(own)
        return self._not_in_xla

    def _for_xla(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> list[Any]:
        """Collective, once: gradients as a program of XLA can exchange them: dense.

        Raises:
            AgreedError: it cannot, on some rank; or variables have no values yet that could become those of rank 0.
        """
        import tensorflow as tf

        from mpitrain.collectives.conversion import refuse_compiled
        from mpitrain.collectives.native_session import NUMBERS
        from mpitrain.strategies.replicas import has_value

        for rank, reason in enumerate(self.xla_obstacles()):
            if reason is not None:
                refuse_compiled(f"on rank {self.world.agreement.number(rank)} {reason}")
        if update.half or not {gradient.dtype.name for gradient in gradients} <= set(NUMBERS):
            refuse_compiled("Python exchanges complex numbers, and halves that are summed as they are")
        if not all(map(has_value, variables)):
            refuse_compiled("variables have no values yet, which are to be those of rank 0")
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def _plan(
        self, gradients: Sequence[Any], variables: Sequence[Any], update: Update, compiled: bool = False
    ) -> BucketPlan:
        """Local: how these gradients, of which none is None, are exchanged. Planned once: that takes milliseconds."""
        added_up = are_added_up()
        kinds = [(type(gradient), gradient.dtype) for gradient in gradients]
        # The number of a variable that is gone may be that of a new one: so the references below are looked at, too.
        key = (update.title, update.half, added_up, compiled, *kinds, *map(id, variables))
        known = self._plans.get(key)
        if known is not None and all(ref() is one for ref, one in zip(known.variables, variables, strict=True)):
            return known.plan
        import tensorflow as tf

        from mpitrain.reduction.graph import plan_of

        plan = plan_of(gradients, variables, update.title, self._hosts, update.half, added_up, compiled)
        part = None
        if update.without_data is not None and not self.joining.knows(plan.call):
            part = update.without_data(gradients, variables)
        self.joining.register(plan.call, part, Part(functools.partial(self._add_nothing, plan)))
        if all(tf.TensorShape(one.shape).is_fully_defined() for one in variables):  # else the gradients' shapes count
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = _Planned(plan, tuple(map(weakref.ref, variables)))
        return plan

    def _add_nothing(self, plan: BucketPlan) -> None:
        """Collective: an update of which nothing here has to follow: of a tape, or of an optimizer that is gone."""
        for index, bucket in enumerate(plan.buckets):
            self.reducer.exchange(plan, index, zeros(plan, bucket), 0.0)


def _present(gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Local: the gradients that are there, and their variables."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
