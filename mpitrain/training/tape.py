"""A gradient tape whose gradients are the mean over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mpitrain.strategies.strategy import Exchange, Update, strategy_of
from mpitrain.strategies.weighting import added_up, current_samples, sample_count, sums
from mpitrain.world.world import World


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`; `gradient` is collective, everything else is the tape's own.

    Args:
        tape: a tape that has recorded, or is recording.
        world: the job; the current one by default.
        exchange: what takes the mean; the strategy of `world` by default.
        synchronize_first: variables become those of rank 0 when they are first seen here.
        loss_is: what each rank's target is: a `mean` over its samples, or a `sum`, so that gradients are added up.
            What `sample_count` says goes before.

    Raises:
        UsageError: another `loss_is`.

    Example:
        >>> weight = tf.Variable(3.0)
        >>> with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = weight**2
        >>> float(tape.gradient(loss, weight))
        6.0
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        world: World | None = None,
        exchange: Exchange | None = None,
        synchronize_first: bool = True,
        loss_is: str = "mean",
    ) -> None:
        self._tape = tape
        self._exchange = exchange or strategy_of(world)
        synchronized = self._synchronize if synchronize_first else None
        self._update = Update("gradients of a tape", synchronize=synchronized, added_up=sums(loss_is))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        *,
        samples: Any = None,
    ) -> Any:
        """Collective: gradients of `target`, averaged over all ranks, or added up.

        With `synchronize_first` variables become those of rank 0 when they are first seen here: in a
        `tf.function` while it is traced; eagerly before the exchange, where the gradients of ranks with
        other values do not count that once.

        Args:
            target: tensor to differentiate.
            sources: variables, in any nest.
            output_gradients: as for `tf.GradientTape.gradient`.
            unconnected_gradients: as for `tf.GradientTape.gradient`.
            samples: samples behind this rank's gradient, or what else `target` was divided by: see `sample_count`.
                Without it, what that says; without that all ranks weigh the same.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        samples = current_samples() if samples is None else samples
        with sample_count(samples), added_up(self._update.added_up, always=False):
            means = self._exchange.update(tf.nest.flatten(gradients), tf.nest.flatten(sources), self._update)
        return tf.nest.pack_sequence_as(sources, means)

    def _synchronize(self, variables: Sequence[Any]) -> bool:
        """Collective: rank 0's values for variables that no tape has seen before; True if any differed."""
        shared = [variable for variable in variables if self._exchange.is_shared(variable)]
        # At once, also while a graph is traced: in the graph it would be done at each of its runs.
        with tf.init_scope():
            return strategy_of(self._exchange.world).synchronize_once(shared)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)
