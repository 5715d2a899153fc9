"""What ranks exchange, and when: the contract of all strategies."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mpitrain.reduction.finite import FiniteCheck
from mpitrain.reduction.statistics import Statistics
from mpitrain.strategies.joining import Joining, Part
from mpitrain.world.agreement import Agreed
from mpitrain.world.policy import Policy
from mpitrain.world.start import current_world
from mpitrain.world.world import World


def handed_back(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Local: what applies the gradients of a program that does so itself."""
    return list(gradients)


@dataclass(eq=False)
class Update:
    """The updates of one optimizer, or of a tape: whose they are, and what is done with the gradients."""

    title: str  # whose gradients these are: the same on all ranks, and of each optimizer another
    # local, makes the rest of the update of gradients and variables, as `Optimizer.apply` does; what it returns is
    # returned by `Exchange.update`
    apply: Callable[[Sequence[Any], Sequence[Any]], Any] = handed_back
    optimizer: Any = None  # of Keras; None where the program applies the gradients itself, so that they are handed back
    # collective: those of these variables that are new, and the state of the optimizer, become rank 0's; True if some
    # rank had others. Called while a graph is traced, and in each update once all have come
    synchronize: Callable[[Sequence[Any]], bool] | None = None
    # local: how a rank makes this update, once it has no data, without gradients like these. It is referred to weakly.
    # None where nothing here has to follow when the others make it
    without_data: Callable[[Sequence[Any], Sequence[Any]], Part] | None = None
    added_up: bool = False  # its gradients are added up over ranks, not averaged, where nothing else is said
    half: bool = False  # half precisions are summed as they are
    state: Any = None  # what the strategy keeps of this optimizer, from `Exchange.attach` on


class Exchange(Protocol):
    """What an optimizer or a tape hands its gradients to: a `Strategy`, or what changes them on the way to one.

    Attributes:
        world: the ranks.
        takes_accumulated: where an optimizer accumulates gradients, `update` is called once for all of them, and
            `apply` only clips them. For what has to see or replace the change of the variables: False; then it is
            called at each step.
        replicates_state: the optimizer's own variables are the same on all ranks after each update.
    """

    world: World
    takes_accumulated: bool = True
    replicates_state: bool = True

    def update(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> Any:
        """Collective: one update. Called eagerly, and while a `tf.function` is traced.

        `weighting.current_samples` tells what the gradients count for, `weighting.are_added_up` whether as a sum.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: of which they are the gradients.
            update: see there.

        Returns:
            What `update.apply` returns, given the gradients of all ranks.
        """
        ...

    def attach(self, update: Update) -> None:
        """Local: updates of this optimizer are going to come. The place to make `update.state`.

        Raises:
            UsageError: the optimizer does what cannot be done here.
        """
        return

    def expect(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> None:
        """Local: such an update is coming, of gradients that are accumulated first: see `Update.without_data`."""
        return

    def is_shared(self, variable: Any) -> bool:
        """Local: whether a variable is the same on all ranks."""
        return True

    def begin_anew(self, update: Update) -> None:
        """Local, on all ranks: variables may have been changed since the last update."""
        return

    def fetch_state(self, update: Update, alone: bool = False) -> None:
        """Collective: the optimizer's own variables are up to date on rank 0, for checkpoints.

        Args:
            update: of the optimizer.
            alone: local instead: this rank saves the optimizer, and the others do not know.
        """
        return


class Strategy(Exchange, Policy):
    """What the ranks of a `World` exchange, and when. A World has one, made when it starts; loads no TensorFlow then.

    Derive from it. `local.Local` is the smallest, `all_reduce.AllReduce` the usual one: a strategy that changes what is
    exchanged derives from that, and calls its `update`. One that exchanges by itself writes `update`, where it

    - calls `update.synchronize`, so that ranks begin with the variables of rank 0;
    - weighs gradients by `weighting.current_samples`, and leaves None where it is;
    - counts in `statistics.updates`, `statistics.samples_global` and `world.activity.updates`, when the update runs;

    and, where all ranks make each update together, `agreed` and `join`: what their header said, and how a rank that has
    run out of data makes the updates of the others with nothing. For that `joining` is one of its own, whose `begin`
    takes the header; each kind of update is registered there before it is first made. What else has a body is right for
    such ranks. Where to begin, for example:

    - parameters averaged every H steps: `update` calls `update.apply` at once and counts in `update.state`; every H
      steps it hands the variables to an `AllReduce` of its own; `in_step` and `lockstep` are False,
      `takes_accumulated` too; what `join` leaves is the average.
    - sharded optimizers: `attach` refuses what is not element-wise; `update` gives `update.apply` this rank's part of
      gradients and variables and gathers these; `replicates_state` is False, `fetch_state` gathers the slots.
    - compression: `AllReduce.update` names a `reduction.compressor.Compressor` to `mean_gradients`; what that is to
      remember stands in variables in `update.state`.

    The checks in tests/contracts/strategy.py hold for each: add yours to JOBS there. Those of the numbers that one
    process gives are only for strategies that are `in_step`; another needs a test of its own numbers beside them.
    """

    # ranks make their steps at the same time, so that what stands inside a step may be collective
    lockstep: bool = True
    statistics: Statistics  # where the time went, on this rank
    finite: FiniteCheck  # looks for values that are not
    joining: Joining  # how a rank without data takes part in what others do
    _optimizers: Iterator[int]
    _synchronized: weakref.WeakValueDictionary[int, Any]

    def __init__(self, world: World) -> None:
        self.world = world
        self.statistics = Statistics()
        self.finite = FiniteCheck(world.communicator, world.agreement)
        self.finite.action = world.faults.non_finite
        self.joining = Joining(world)
        self._optimizers = itertools.count()
        self._synchronized = weakref.WeakValueDictionary()

    @property
    def exchanges(self) -> bool:
        """Whether gradients of this rank go anywhere."""
        return True

    @property
    def in_step(self) -> bool:
        """Whether all ranks have the same variables after each update."""
        return True

    @property
    def agreed(self) -> Agreed | None:
        """What ranks said in the header of the latest update, if there was one that all made together."""
        return None

    def xla_obstacles(self) -> Sequence[str | None]:
        """Collective, once: why ranks cannot exchange in what XLA compiles; None for one that can; () if unknown."""
        return ()

    def join(self, collectives: bool = False) -> int:
        """Collective: wait until all ranks are here, and take part in the updates of those that still have data.

        Args:
            collectives: take part in all-reduce and all-gather of the program as well.

        Returns:
            How many updates, or other calls, this rank took part in.
        """
        return 0

    def leave(self) -> None:
        """Collective: at the end of the program; returns when all ranks have come to theirs."""
        self.world.agreement.leave()

    def on_shrink(self) -> None:
        """Local: ranks were lost, perhaps in the middle of an update; `world` has those that are left."""
        return

    def catch_up(self) -> None:
        """Collective among the ranks that are left: the variables become those that are kept elsewhere, if any are."""
        return

    def done(self) -> Mapping[int, int]:
        """Local: of each rank, by its number in the job, how many gradients were used or dropped, where it is counted.

        It is where ranks do not make their updates together, so that those of a lost one are not known otherwise.
        """
        return {}

    def count_from(self, updates: int) -> None:
        """Local: so many updates are made, on all ranks."""
        self.world.activity.updates = self.statistics.updates = updates

    def next_number(self) -> int:
        """Local: 0, 1, 2, ...: tells optimizers apart, whose variables may have equal names."""
        return next(self._optimizers)

    def synchronize_once(self, variables: Sequence[Any]) -> bool:
        """Collective: rank 0's values for variables that were not given here before; True if any differed.

        Variables without a value, which exist only in the graph being traced, are left as they are.
        """
        from mpitrain.strategies import replicas

        new = [v for v in variables if hasattr(v, "assign") and self._synchronized.get(id(v)) is not v]
        self._synchronized.update({id(v): v for v in new})
        valued = [v for v in new if replicas.has_value(v)]
        return bool(valued) and replicas.synchronize(valued, world=self.world)


def strategy_of(world: World | None = None) -> Strategy:
    """Local: the strategy of `world`, or of the current one."""
    return cast(Strategy, (world or current_world()).strategy)
