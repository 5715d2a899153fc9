"""One exchange for all optimizers of a job: means, joining of ranks that ran out of data, statistics."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpitrain.comm.agreement import signature_of
from mpitrain.comm.world import World, current_world
from mpitrain.errors import CollectiveError
from mpitrain.reduction.reducer import Reducer, Statistics

_samples: contextvars.ContextVar[Any] = contextvars.ContextVar("samples", default=1.0)


@contextlib.contextmanager
def sample_count(samples: Any) -> Iterator[None]:
    """Local: gradients exchanged inside this context stand for `samples` samples.

    Ranks' means are weighted by it, so that ranks with batches of different sizes give the exact
    mean of the global batch. Without it all ranks weigh the same.

    Args:
        samples: a number, or a scalar tensor of the graph being traced.
    """
    token = _samples.set(samples)
    try:
        yield
    finally:
        _samples.reset(token)


class Exchange:
    """Gradient exchange of one job."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reducer = Reducer(world.communicator, world.agreement, world.all_reduce)
        self._empty_updates: dict[int, Callable[[], None]] = {}

    @property
    def statistics(self) -> Statistics:
        """Where the time went, on this rank."""
        return self.reducer.statistics

    def mean(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        synchronize: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Collective: the mean of gradients over the samples of all ranks; None stays None.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: of which they are the gradients.
            synchronize: see `Reducer.exchange`.
        """
        if self.world.size == 1:
            return list(gradients)
        from mpitrain.reduction.graph import mean_gradients

        present = [position for position, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return list(gradients)
        means = mean_gradients(
            self.reducer,
            [gradients[p] for p in present],
            [variables[p] for p in present],
            _samples.get(),
            synchronize,
        )
        result: list[Any] = list(gradients)
        for position, mean in zip(present, means, strict=True):
            result[position] = mean
        return result

    def knows(self, description: str) -> bool:
        """Local: whether this rank can take part in that update without data."""
        return signature_of(description) in self._empty_updates

    def register_empty_update(self, description: str, update: Callable[[], None]) -> None:
        """Local: how this rank takes part, with nothing of its own, in the update so described."""
        self._empty_updates[signature_of(description)] = update

    def join(self, finished: bool = False) -> None:
        """Collective: take part in the updates of ranks that still have data, until all have joined.

        Args:
            finished: this rank is at the end of its program and leaves only with all the others.

        Raises:
            CollectiveError: the others make an update this rank has never made.
        """
        if self.world.size == 1:
            return
        while True:
            agreed = self.world.agreement.idle(finished)
            if agreed.signature is None:
                if not finished or agreed.finished:
                    return
                continue
            update = self._empty_updates.get(agreed.signature)
            if update is None:
                if finished:
                    return  # the others were told by the same header, and raise
                raise CollectiveError(
                    f"rank {self.world.rank} ({self.world.hosts[self.world.rank]}) has no data left while others go on "
                    "with an operation it has never done itself, so it cannot take part. Give every rank at least one batch."
                )
            self.reducer.contribute_nothing(agreed)
            update()


@functools.cache
def exchange_of(world: World) -> Exchange:
    """Local: the one exchange of a job."""
    exchange = Exchange(world)
    world.at_finish(functools.partial(exchange.join, finished=True))
    return exchange


def current_exchange(world: World | None = None) -> Exchange:
    """Local: the exchange of `world`, or of the current one."""
    return exchange_of(world or current_world())
