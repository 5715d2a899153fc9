"""The mean of gradients by itself, for programs that have neither an optimizer of Keras nor a tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.strategies.strategy import Strategy, Update, strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.world.world import World

__all__ = ["GradientExchange", "current_exchange", "sample_count"]


class GradientExchange:
    """What the ranks of a job make of their gradients.

    Args:
        strategy: of the job.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def mean(self, gradients: Sequence[Any], variables: Sequence[Any], title: str) -> list[Any]:
        """Collective: the mean of gradients over the samples of all ranks (see `sample_count`); None stays None.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: of which they are the gradients.
            title: whose gradients these are, the same on all ranks.
        """
        means: list[Any] = self._strategy.update(gradients, variables, Update(title))
        return means


def current_exchange(world: World | None = None) -> GradientExchange:
    """Local: the exchange of `world`, or of the current one."""
    return GradientExchange(strategy_of(world))
