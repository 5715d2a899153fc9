"""A gradient tape whose gradients are the mean over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mpitrain.comm.world import World
from mpitrain.training.exchange import current_exchange, sample_count


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`; `gradient` is collective, everything else is the tape's own.

    Args:
        tape: a tape that has recorded, or is recording.
        world: the job; the current one by default.
    """

    def __init__(self, tape: tf.GradientTape, *, world: World | None = None) -> None:
        self._tape = tape
        self._exchange = current_exchange(world)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, *, samples: Any = None) -> Any:
        """Collective: gradients of `target`, averaged over all ranks.

        Args:
            target: tensor to differentiate.
            sources: variables, in any nest.
            output_gradients: as for `tf.GradientTape.gradient`.
            samples: samples behind this rank's gradient, number or scalar tensor; all ranks weigh
                the same without it.
        """
        gradients = self._tape.gradient(target, sources, output_gradients)
        flat = tf.nest.flatten(gradients)
        variables = tf.nest.flatten(sources)
        if samples is None:
            means = self._exchange.mean(flat, variables)
        else:
            with sample_count(samples):
                means = self._exchange.mean(flat, variables)
        return tf.nest.pack_sequence_as(sources, means)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)
