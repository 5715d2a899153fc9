"""A training run that goes on without the ranks it loses, in the same process.

Where the ranks that are left stand is one step apart at most: of an update some may have finished the exchange, and so
have made it, while others had not. (An update is made as a whole or not at all: see `AllReduce._whole_updates`.) The
state of a rank that is furthest becomes that of all; samples whose update was made nowhere are dealt out again, with
the rest of the epoch, among those that are left. What was traced stays as it is: it asks the World who takes part.

Workers of parameter servers stand wherever their own steps have led them. What they have in common is on the servers:
all take over the parameters from there, and what was trained is what the servers counted (see `remaining_samples`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from mpitrain.checkpoint.counters import counters_of, set_counters
from mpitrain.checkpoint.options import Position
from mpitrain.checkpoint.state import items_of
from mpitrain.data.sharding import Indices
from mpitrain.data.source import DataSource
from mpitrain.errors import RankLostError, UsageError
from mpitrain.faults.options import SHRINK
from mpitrain.runtime import streams
from mpitrain.runtime.counted import counted
from mpitrain.strategies.parameter_server.connection import is_served
from mpitrain.strategies.replicas import adopt
from mpitrain.strategies.strategy import strategy_of
from mpitrain.trainer.remaining_samples import RemainingSamples
from mpitrain.trainer.run_callbacks import RunCallbacks
from mpitrain.world import shrink
from mpitrain.world.world import World

Result = TypeVar("Result")
TRAINING, TIMES, EVALUATION, COUNTING, SAVING = range(5)


@dataclass(frozen=True)
class LostRanks:
    """Ranks that were lost while the others went on."""

    ranks: tuple[int, ...]  # their numbers in the job as it was started
    hosts: tuple[str, ...]  # their hosts
    left: int  # how many ranks went on
    epoch: int  # from 0, in which it happened
    update: int  # the last one that was made with them
    seconds: float  # from the moment when it was noticed to the end of the next step

    def __str__(self) -> str:
        names = ", ".join(f"{rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True))
        return (
            f"rank{'s' * (len(self.ranks) > 1)} {names} in epoch {self.epoch + 1} after update {self.update}; "
            f"{counted(self.left, 'rank')} had made the next step {self.seconds:.2f} s later"
        )


class ShrinkableRun:
    """The stages of one run. One that fails because a rank was lost is done again by those that are left.

    Args:
        counting: callbacks whose counters decide something.

    Attributes:
        source: the data, with the share that this rank has now.
        every: the callbacks of the training, once there are any.
        losses: so far.
        on_shrink: called after ranks were lost, with the place to go on from and whether that is in the training.
    """

    def __init__(
        self, world: World, model: Any, source: DataSource, batch_size: int, counting: Sequence[Any] = ()
    ) -> None:
        self.source, self.losses = source, list[LostRanks]()
        self.every: RunCallbacks | None = None
        self.on_shrink: Callable[[Position, bool], None] = lambda position, training: None
        self._world, self._model, self._batch_size, self._counting = world, model, batch_size, list(counting)
        self._results: dict[int, Any] = {}
        self._untold: dict[int, float] = {}  # places in `losses`, and when they were noticed
        self._begin = world.activity.updates
        self._remaining: RemainingSamples | None = None
        self._left: Indices | None = None  # of the epoch under way, where that is no end of its order

    def begin(self, position: Position) -> None:
        """Collective: the training begins there."""
        world, order = self._world, self.source.order
        if self.is_asked_for and is_served(world) and order is not None:
            done = world.communicator.broadcast_obj(strategy_of(world).done() if world.is_root else None)
            left = order(position.epoch, position.samples)
            whole = functools.partial(_whole, order)
            self._remaining = RemainingSamples(whole, self._batch_size, position.epoch, left, world.numbers, done)

    def rest(self, position: Position) -> Any:
        """Local: this rank's share of what is left of the epoch under way; None where that is not known."""
        source = self.source
        if self._left is not None and source.some is not None:
            return source.some(self._left)
        return None if source.rest is None else source.rest(position.epoch, position.samples)

    @property
    def is_asked_for(self) -> bool:
        """Whether the run is to go on without ranks that are lost."""
        return self._world.faults.on_failure == SHRINK and self._world.shrink_group.job.size > 1

    @property
    def per_step(self) -> int:
        """Samples that all ranks take in one step."""
        return self._batch_size * self._world.size

    def count(self, epoch: int, logs: Any = None) -> None:
        """Local: the next epoch that the data give is this one; for callbacks, at its beginning."""
        if self.source.epochs is not None:
            self.source.epochs.epoch = epoch

    def check(self) -> None:
        """Local: whether the model can be trained so.

        Raises:
            UsageError: it cannot.
        """
        if self.is_asked_for and getattr(self._model.optimizer, "gradient_accumulation_steps", None):
            raise UsageError(
                "--on-failure shrink: a lost rank would take its accumulated gradients with it; train without "
                "gradient_accumulation_steps, or with `mpitrain run --on-failure restart`"
            )
        if self.is_asked_for and is_served(self._world) and self.source.deal is not None and self.source.some is None:
            raise UsageError(
                f"--on-failure shrink with --strategy ps: {self.source.description} has no positions of samples, so "
                "those of a lost worker could not be dealt out again; leave out one of the two"
            )

    def stage(self, number: int, action: Callable[[], Result]) -> Result:
        """Collective: what `action` returns, or what it returned on a rank that was ahead when another was lost.

        Args:
            number: of the stage, in ascending order.
            action: collective; when it is called again, it begins where `every` is.

        Raises:
            RankLostError: on all ranks that are left: the job is not to go on, or cannot.
        """
        per_step = self.per_step
        while number not in self._results:
            try:
                self._results[number] = action()
            except (RankLostError, tf.errors.OpError) as error:
                if not self._is_loss(error):
                    raise
                trace = error.with_traceback(None)  # whose frames hold the data that are no longer read
            else:
                break
            self._shrink(number, per_step, trace)
            per_step = self.per_step
        found: Result = self._results[number]
        return found

    def _is_loss(self, error: Exception) -> bool:
        return self.source.deal is not None and shrink.is_shrinkable(self._world, error)

    def _shrink(self, stage: int, per_step: int, error: Exception) -> None:
        """Collective: go on with those that are left, whoever dies meanwhile."""
        ranks, hosts, since = list[int](), list[str](), time.monotonic()
        position: Position | None = None
        is_done = False
        while not is_done:
            left = shrink.shrink(self._world, stage)
            since = min(since, left.since_seconds)
            ranks, hosts = [*ranks, *left.lost], [*hosts, *left.hosts]
            if shrink.AT_END in left.where:  # after the last stage, so this one is over
                self._results[stage] = None
                return
            with contextlib.suppress(RankLostError):  # another one
                position = self._take_over(stage, per_step)
                is_done = True
        if position is None:
            text = "a rank was lost before all others had made an update, so the job is to be started again"
            raise RankLostError(text) from error
        updates = self._world.activity.updates
        self._note(LostRanks(tuple(ranks), tuple(hosts), self._world.size, position.epoch, updates, 0.0), since)

    def _note(self, loss: LostRanks, since: float) -> None:
        """Local: tell of the loss, and of any other of the same step, once the next step is done."""
        self._untold[len(self.losses)] = since
        self.losses.append(loss)

        def done() -> None:
            for place, noticed in self._untold.items():
                self.losses[place] = dataclasses.replace(self.losses[place], seconds=time.monotonic() - noticed)
                if self._world.is_root:
                    streams.write_stderr(f"mpitrain: lost: {self.losses[place]}\n")
            self._untold.clear()
            if self.every is not None:
                self.every.after_step = None

        if self.every is None or 0 in self._results:
            done()
        else:
            self.every.after_step = done

    def _take_over(self, stage: int, per_step: int) -> Position | None:
        """Collective: all ranks become what the one that is furthest is; None if that has not made an update yet.

        Raises:
            RankLostError: another one was lost. Then nothing was changed on any rank.
        """
        world, every, activity = self._world, self.every, self._world.activity
        communicator = world.communicator
        places = communicator.all_gather_obj((stage, every.ended if every else 0, activity.updates))
        # By stage first, then by epochs that have ended, then by updates.
        furthest = max(places)
        # Of a worker that has made no update the servers may know nothing; all-reduce makes each on all ranks.
        made = min(updates for _, _, updates in places) if self._remaining is not None else furthest[2]
        if every is None or made == self._begin:
            return None
        strategy = strategy_of(world)
        strategy.catch_up()
        samples = self.source.train_count
        facts: Any = None
        root = places.index(furthest)
        if world.rank == root:
            counters = [counters_of(callback) for callback in self._counting]
            stop = bool(self._model.stop_training)
            facts = every.position(per_step, samples), strategy.done(), *every.noted, counters, stop, self._results
        facts = communicator.broadcast_obj(facts, root)
        position, done = facts[:2]
        history, epochs, counters, stop, results = facts[2:]
        variables = [item.variable for item in items_of(self._model) if item.rule is None]
        adopt(variables, root, world=world)
        # From here on nothing is asked of the others.
        strategy.count_from(furthest[2])
        position = self._deal_again(position, done, TRAINING not in results)
        self._results, self._model.stop_training = dict(results), stop
        for callback, counter in zip(self._counting, counters, strict=True):
            set_counters(callback, counter)
        every.on_shrink(position, samples, history, epochs)
        assert self.source.deal is not None  # `_is_loss`
        self.source = self.source.deal(world.rank, world.size)
        self.on_shrink(position, TRAINING not in results)
        return position

    def _deal_again(self, position: Position, done: dict[int, int], training: bool) -> Position:
        """Local: what nobody has trained with is dealt out to the workers that are left; where that is."""
        if self._remaining is None or not training:
            return position
        left = self._remaining.after(position.epoch, done)
        self._remaining.deal(position.epoch, left, self._world.numbers, done)
        self._left = left
        return dataclasses.replace(position, samples=self.source.train_count - len(left))


def _whole(order: Callable[[int, int], Indices], epoch: int) -> Indices:
    return order(epoch, 0)
