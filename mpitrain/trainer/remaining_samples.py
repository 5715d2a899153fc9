"""Samples of an epoch that were trained by nobody, where each worker takes its steps at its own pace. Pure.

The servers have counted the gradients of each worker. Which samples these were follows from how they were dealt out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpitrain.data.sharding import Indices


class RemainingSamples:
    """Follows how samples are dealt out to the workers, and dealt out again when some are lost.

    Args:
        order: the positions of an epoch, by its number, in the order in which they are dealt out.
        epoch: that is under way.
        left: positions of it that are dealt out.
        numbers: of the workers, in the job as it was started.
        done: how many gradients of each worker were counted before.
    """

    def __init__(
        self,
        order: Callable[[int], Indices],
        batch_size: int,
        epoch: int,
        left: Indices,
        numbers: Sequence[int],
        done: Mapping[int, int],
    ) -> None:
        self._order, self._batch_size = order, batch_size
        self.deal(epoch, left, numbers, done)

    def deal(self, epoch: int, left: Indices, numbers: Sequence[int], done: Mapping[int, int]) -> None:
        """Local: from now on so; see `RemainingSamples`. Later epochs are dealt out to the same workers, as a whole."""
        self._epoch, self._left, self._numbers, self._done = epoch, left, tuple(numbers), dict(done)

    def after(self, epoch: int, done: Mapping[int, int]) -> Indices:
        """Local: positions of an epoch that nobody has trained with, in their order."""
        size, positions = len(self._numbers), self._of(epoch)
        is_left = np.ones(len(positions), np.bool_)
        for worker, number in enumerate(self._numbers):
            steps = done.get(number, 0) - self._done.get(number, 0)
            for earlier in range(self._epoch, epoch):
                # Of the gradients that were counted, those of epochs before this one.
                steps -= -(-len(self._of(earlier)[worker::size]) // self._batch_size)
            is_left[worker::size][: max(0, steps) * self._batch_size] = False
        return positions[is_left]

    def _of(self, epoch: int) -> Indices:
        return self._left if epoch == self._epoch else self._order(epoch)
