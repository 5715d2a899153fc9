"""Batch normalization with the moments of all ranks' rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from mpitrain.strategies.weighting import current_samples
from mpitrain.training.step_collectives import StepCollectives


def moments(
    inputs: tf.Tensor, mask: Any, axes: Sequence[int], collectives: StepCollectives, weight: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Collective, also on the way back: as `keras.layers.BatchNormalization._moments`, over all ranks.

    Each rank takes its own moments, and then only sums travel, in double precision: they lose nothing where the mean is
    large beside the deviation. `weight` is how much this rank's gradients count when the mean over ranks is taken;
    `mask` says what counts, None for everything.

    Returns:
        Mean and variance, (channels,), in the dtype of `inputs`.
    """
    values = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    if mask is None:
        counted, epsilon = tf.ones_like(values), 0.0
    else:  # Keras adds this to the number of what counts
        counted = tf.broadcast_to(tf.cast(mask, values.dtype)[..., None], tf.shape(values))
        epsilon = keras.backend.epsilon()
    values = tf.where(counted > 0, values, 0)
    count = tf.reduce_sum(counted, axes)
    own_mean = tf.math.divide_no_nan(tf.reduce_sum(values, axes), count)
    shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
    squares = tf.reduce_sum(tf.square(values - tf.reshape(own_mean, shape)) * counted, axes)
    count, own_mean, squares = (tf.cast(part, tf.float64) for part in (count, own_mean, squares))
    parts = tf.stack([count * own_mean, squares + count * tf.square(own_mean), count])
    weight = tf.cast(weight, tf.float64)
    # Nothing where another rank computes, and counts, the same rows.
    parts *= tf.cast(tf.cast(current_samples(), tf.float64) > 0, tf.float64)
    total, total_squares, total_count = tf.unstack(collectives.weighted_total(parts, weight))
    divisor = total_count + epsilon
    mean = tf.math.divide_no_nan(total, divisor)
    distance = total_squares - 2.0 * mean * total + total_count * tf.square(mean)
    # Rounding may bring a variance of nothing below 0, of which the root is NaN.
    variance = tf.maximum(tf.math.divide_no_nan(distance, divisor), 0.0)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
