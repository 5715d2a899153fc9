"""What is known of losses: who wrote one, what Keras divides it by, and what is said of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from mpitrain.runtime import keras_private

UNREDUCED = (None, "none")
OF_SERVERS = (
    "parameter servers average gradients by rows, but a loss of this model divides by something else (a mask, sample "
    'weights, reduction="sum" or None): it is not that of the whole batch, as --strategy all-reduce would make it'
)
MOMENTS_OF_SERVERS = (
    "workers of parameter servers do not wait for each other in a step: BatchNormalization(synchronized=True) takes "
    "the moments of each worker's own rows; --strategy all-reduce takes those of all"
)


def taken_for_a_mean(what: str) -> str:
    """Local: the sentence on a loss of which nothing is known."""
    remedy = 'if it is a sum over them, divided by what the script likes, give --loss-is sum (loss_is="sum")'
    return f"{what} is taken for a mean over the rows of a batch: {remedy}"


def added_to_the_loss(name: str) -> str:
    """Local: the sentence on a step that asks Keras for the loss, and goes on with something else."""
    return (
        f"what the train_step of {name} makes of the loss that Keras computes is taken for a mean over the rows of a "
        "batch: divide a sum over rows by their number"
    )


def one_number_of_a_sum(name: str) -> str:
    """Local: the sentence on a `Sum` of which it is not known what it adds up."""
    return (
        f"the metric {name} (keras.metrics.Sum) gets one number for a batch, which is taken for a mean over its rows: "
        "where it is a sum over them, give it a number for each row, or a whole number"
    )


def divisor(values: Any, sample_weight: Any, mask: Any, reduction: str) -> Any:
    """Local: what Keras divides a sum over `values` by; None for what grows with the number of rows.

    The arguments are those of `reduce_weighted_values`.
    """
    if reduction == "mean_with_sample_weight":
        weight = keras_private.weight_with_mask(values, sample_weight, mask, reduction)
        return None if weight is None else tf.reduce_sum(weight)
    if mask is not None:
        valid = tf.reduce_sum(tf.cast(mask, tf.float64))
        ratio = tf.size(values, tf.int64) / tf.maximum(tf.size(mask, tf.int64), 1)
        return valid * tf.cast(ratio, tf.float64)
    return None


def of_keras(thing: Any) -> bool:
    """Local: whether a loss is one that comes with Keras."""
    owner = getattr(thing, "fn", None) or type(thing)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "keras"


def overriding(kind: Any) -> Iterator[Any]:
    """Local: classes of the script below this one that have a `__call__` of their own."""
    for below in kind.__subclasses__():
        if "__call__" in vars(below) and not below.__module__.startswith("keras."):
            yield below
        yield from overriding(below)
