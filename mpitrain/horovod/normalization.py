"""Batch normalization with the moments of all ranks' samples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.horovod.basics import Sum, size
from mpitrain.horovod.operations import allreduce


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalizes with the mean and variance of the global batch: sums, squares and counts of all ranks.

    Ranks may have batches of different sizes, but each needs a batch at every step.

    Args:
        fused: only False, as in Horovod.
        kwargs: as for `keras.layers.BatchNormalization`.

    Raises:
        UsageError: `fused=True`.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise UsageError("SyncBatchNormalization does not support fused=True")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        """Collective: mean and variance over the batches of all ranks."""
        if size() == 1:
            return super()._moments(inputs, mask)
        values = tf.cast(inputs, tf.float32)
        weights = tf.ones(tf.shape(values)[:-1], tf.float32)[..., None] if mask is None else tf.cast(mask, tf.float32)
        weights = tf.broadcast_to(weights if mask is None else tf.expand_dims(weights, -1), tf.shape(values))
        axes = self._reduction_axes
        own = [tf.reduce_sum(part, axes) for part in (values * weights, tf.square(values) * weights, weights)]
        total, squares, count = tf.unstack(allreduce(tf.stack(own), op=Sum))
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
