"""A gradient tape whose gradients are the mean over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mpitrain.strategies.exchange import Exchange, current_exchange
from mpitrain.strategies.weighting import added_up, current_samples, sample_count, sums
from mpitrain.world.world import World


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`; `gradient` is collective, everything else is the tape's own.

    Args:
        tape: a tape that has recorded, or is recording.
        world: the job; the current one by default.
        exchange: what takes the mean; that of `world` by default.
        synchronize_first: variables become those of rank 0 when they are first seen here.
        loss_is: what each rank's target is: a `mean` over its samples, or a `sum`, so that gradients are added up.
            What `sample_count` says goes before.

    Raises:
        UsageError: another `loss_is`.
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
        self._exchange = exchange or current_exchange(world)
        self._synchronize_first = synchronize_first
        self._adds = sums(loss_is)

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
        variables = tf.nest.flatten(sources)
        if not tf.executing_eagerly() and self._exchange.world.size > 1 and self._synchronize_first:
            with tf.init_scope():
                self._exchange.synchronize_once(variables)
        samples = current_samples() if samples is None else samples
        with sample_count(samples), added_up(self._adds, always=False):
            means = self._exchange.mean(
                tf.nest.flatten(gradients),
                variables,
                "gradients of a tape",
                (lambda: self._exchange.synchronize_once(variables)) if self._synchronize_first else None,
            )
        return tf.nest.pack_sequence_as(sources, means)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)
