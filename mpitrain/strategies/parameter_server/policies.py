"""When a server updates its parameters, with whose gradients, and when it answers. Pure: no communication.

A policy is told what has come, and tells its host what to do about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpitrain.strategies.parameter_server.messages import Message
from mpitrain.strategies.parameter_server.options import ServerOptions


@dataclass
class Push:
    """One gradient of one worker, part by part."""

    worker: int  # its position
    first: Message  # the header of its first part
    content: dict[int, Any] = field(default_factory=dict)  # of each part that has come


class Host(Protocol):
    """What a policy acts upon: the parts of one session on one server."""

    def update(self, part: int, pushes: Sequence[Push], learning_rate: float, divisor: float) -> None:
        """Local: apply the mean of one part of these gradients, with the learning rate divided by `divisor`."""
        ...

    def update_all(self, pushes: Sequence[Push], learning_rate: float) -> None:
        """Local: apply the mean of all parts, with norms that take in all of them."""
        ...

    def answer(self, worker: int, part: int, dropped: bool) -> None:
        """Local: send a part as it is now to a worker."""
        ...


LOST = -1


@dataclass
class Counts:
    """What happened on one server."""

    updates: int = 0  # that were made
    samples: float = 0.0  # behind them
    # gradients that did not count, by worker; those of workers that were lost as of worker LOST
    dropped: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)  # how many gradients were computed so many updates ago

    def on_shrink(self, left: Sequence[int]) -> None:
        """Local: some workers were lost.

        Args:
            left: of each that is left, counted anew, which it was.
        """
        before, self.dropped = self.dropped, Counter()
        for worker, number in before.items():
            self.dropped[left.index(worker) if worker in left else LOST] += number


class SyncPolicy:
    """One update for a gradient of each worker that has data, or of all but the last `backup_workers` of them.

    Without backup workers each part is updated, and on its way back, as soon as all workers' have come. With them a
    step takes the gradients that are complete first, and those that come later, or have no samples, are dropped:
    Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

    Args:
        host: the parts.
        parts: their positions, in the order in which they come.
        workers: how many there are.
        backup_workers: how many gradients of a step are not waited for.
        whole: gradients are clipped by norms, so no part is updated before all have come.
    """

    def __init__(self, host: Host, parts: Sequence[int], workers: int, backup_workers: int, whole: bool) -> None:
        self._host, self._parts = host, list(parts)
        self._backup_workers = backup_workers
        self._by_part = not whole and backup_workers == 0
        self._pushes: dict[int, Push] = {}
        self._complete: list[Push] = []
        self._next = 0
        self.active = set(range(workers))
        self.counts = Counts()
        self.done: Counter[int] = Counter()  # gradients of each worker that were applied, or dropped
        self.step: list[Push] = []  # of the last update, or of the one under way

    @property
    def version(self) -> int:
        """Updates so far."""
        return self.counts.updates

    def came(self, worker: int, message: Message, content: Any) -> None:
        """Local: one part of a gradient of a worker."""
        push = self._pushes.setdefault(worker, Push(worker, message))
        push.content[message.part] = content
        if len(push.content) == len(self._parts) and not self._by_part:
            self._complete.append(self._pushes.pop(worker))
        self.look()

    def look(self) -> None:
        """Local: update what can be updated now; called also when `active` has changed."""
        if self._by_part:
            self._look_at_parts()
            return
        for push in [one for one in self._complete if one.first.version < self.version or one.first.samples <= 0]:
            self._drop(push)
        needed = max(1, len(self.active) - self._backup_workers)
        if len(self._complete) >= needed:
            # Added up in the order of the workers, not in that in which they came: the sum's bits depend on it.
            chosen = sorted(self._complete[:needed], key=lambda push: push.worker)
            self.step = chosen
            self._complete = self._complete[needed:]
            self._host.update_all(chosen, chosen[0].first.learning_rate)
            self._count(chosen)
            for push in chosen:
                self._answer(push, dropped=False)
            self.look()

    def _look_at_parts(self) -> None:
        while self._pushes and self._next < len(self._parts):
            part = self._parts[self._next]
            if not all(worker in self._pushes and part in self._pushes[worker].content for worker in self.active):
                return
            self.step = [self._pushes[worker] for worker in sorted(self._pushes)]
            self._host.update(part, self.step, self.step[0].first.learning_rate, 1.0)
            self._next += 1
            if self._next == len(self._parts):
                self._count(self.step)
                self._pushes, self._next = {}, 0
            for push in self.step:
                push.content[part] = None
                self._host.answer(push.worker, part, dropped=False)

    def _count(self, pushes: Sequence[Push]) -> None:
        self.counts.updates += 1
        self.counts.samples += sum(push.first.samples for push in pushes)
        self.done.update(push.worker for push in pushes)

    def _drop(self, push: Push) -> None:
        self._complete.remove(push)
        self.counts.dropped[push.worker] += 1
        self.done[push.worker] += 1
        self._answer(push, dropped=True)

    def _answer(self, push: Push, dropped: bool) -> None:
        for part in self._parts:
            self._host.answer(push.worker, part, dropped)

    def released(self) -> None:
        """Local: all workers stand at the same place, and go on from there."""

    def on_shrink(self, left: Sequence[int]) -> None:
        """Local: some workers were lost; what was not applied of any is forgotten. See `Counts.on_shrink`."""
        self._pushes, self._complete, self._next, self.step = {}, [], 0, []
        self.active, self.done = set(range(len(left))), Counter()
        self.counts.on_shrink(left)


class AsyncPolicy:
    """One update for each gradient, when it comes: Dean et al., "Large Scale Distributed Deep Networks", 2012.

    A gradient's staleness is the number of updates between the parameters that it was computed with and its own.
    A worker that is more than `max_staleness` steps ahead of the slowest gets its answer when that has caught up
    (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013).

    Args:
        host: the parts.
        parts: their positions, in the order in which they come.
        workers: how many there are.
        options: what is done with stale gradients.
    """

    def __init__(self, host: Host, parts: Sequence[int], workers: int, options: ServerOptions) -> None:
        self._host, self._parts, self._options = host, list(parts), options
        self._limit = stalest(options.max_staleness, workers)
        self._pushes: dict[int, Push] = {}
        self._divisors: dict[int, float | None] = {}
        self._held: list[tuple[int, int, bool]] = []
        self._steps = dict.fromkeys(range(workers), 0)
        self.active = set(range(workers))
        self.counts = Counts()
        self.done: Counter[int] = Counter()  # gradients of each worker that were applied, or dropped
        self.step: list[Push] = []

    @property
    def version(self) -> int:
        """Updates so far."""
        return self.counts.updates

    def came(self, worker: int, message: Message, content: Any) -> None:
        """Local: one part of a gradient of a worker."""
        if worker not in self._pushes:
            self._pushes[worker] = Push(worker, message)
            self._divisors[worker] = self._divisor(worker, message)
        push, divisor = self._pushes[worker], self._divisors[worker]
        push.content[message.part] = content
        is_whole = len(push.content) == len(self._parts)
        due = [] if self._options.whole_updates else [message.part]
        if self._options.whole_updates and is_whole:
            due = list(push.content)
        for part in due:
            if divisor is not None:
                self._host.update(part, [push], push.first.learning_rate, divisor)
            push.content[part] = None
        if is_whole:
            del self._pushes[worker]
            self._steps[worker] += 1
            self.done[worker] += 1
            if divisor is not None:
                self.counts.updates += 1
                self.counts.samples += push.first.samples
        self._held += [(worker, part, divisor is None and push.first.samples > 0) for part in due]
        self.look()

    def look(self) -> None:
        """Local: answer those that are not too far ahead; called also when `active` has changed."""
        held, self._held = self._held, []
        for worker, part, dropped in held:
            if self._is_ahead(worker):
                self._held.append((worker, part, dropped))
            else:
                self._host.answer(worker, part, dropped)

    def _is_ahead(self, worker: int) -> bool:
        bound = self._options.max_staleness
        if bound is None or worker in self._pushes:  # the rest of its gradient is under way
            return False
        return self._steps[worker] > min((self._steps[other] for other in self.active), default=0) + bound

    def _divisor(self, worker: int, message: Message) -> float | None:
        """Local: of the learning rate; None if the gradient is dropped."""
        if message.samples <= 0:
            self.counts.dropped[worker] += 1
            return None
        staleness = self.version - message.version
        self.counts.staleness[staleness] += 1
        if self._options.stale == "drop" and staleness > self._limit:
            self.counts.dropped[worker] += 1
            return None
        return float(max(1, staleness)) if self._options.stale == "scale" else 1.0

    def released(self) -> None:
        """Local: all workers stand at the same place, and go on from there."""
        most = max(self._steps.values())
        self._steps = dict.fromkeys(self._steps, most)

    def on_shrink(self, left: Sequence[int]) -> None:
        """Local: some workers were lost; what was not applied of any is forgotten. See `Counts.on_shrink`."""
        self._pushes, self._divisors, self._held, self.step = {}, {}, [], []
        self._steps = dict.fromkeys(range(len(left)), 0)
        self._limit = stalest(self._options.max_staleness, len(left))
        self.active, self.done = set(range(len(left))), Counter()
        self.counts.on_shrink(left)


def stalest(max_staleness: int | None, workers: int) -> int:
    """Local: from how many updates on a gradient is too stale for `--stale drop`.

    Equally fast workers make `workers - 1` updates between two of one. A worker may be `max_staleness` steps behind
    the others, or 1 where that is not given; what comes later than that is dropped.
    """
    return ((1 if max_staleness is None else max_staleness) + 1) * (workers - 1)
