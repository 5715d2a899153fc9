"""Buckets inside a TensorFlow graph: one host call each, chained in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.reduction.buckets import BucketPlan, TensorSpec, plan_buckets
from mpitrain.reduction.reducer import Reducer

Gradient = tf.Tensor | tf.IndexedSlices


def spec_of(gradient: Gradient, variable: Any) -> TensorSpec:
    """Local: what all ranks must agree on about one gradient."""
    name = getattr(variable, "path", None) or variable.name
    shape = tuple(int(n) for n in variable.shape)
    return TensorSpec(name, shape, gradient.dtype.name, isinstance(gradient, tf.IndexedSlices))


def mean_gradients(
    reducer: Reducer,
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    samples: Any,
    synchronize: Callable[[], bool] | None = None,
) -> list[Gradient]:
    """Collective: the mean of `gradients` over the samples of all ranks.

    Works eagerly and while a `tf.function` is traced. In a graph each bucket is one stateful
    host call, and control dependencies chain the calls: every rank makes them in the same order,
    one at a time, while the backward pass of earlier layers goes on.

    Args:
        reducer: does the exchange in host memory.
        gradients: dense or `IndexedSlices`; no None.
        variables: of which they are the gradients, the same order on all ranks.
        samples: number (or scalar tensor) of samples behind this rank's gradients.
        synchronize: see `Reducer.exchange`.
    """
    plan = plan_buckets([spec_of(g, v) for g, v in zip(gradients, variables, strict=True)])
    results: list[Gradient] = list(gradients)
    samples = tf.cast(samples, tf.float64)
    previous: list[Any] = []
    for index, bucket in enumerate(plan.buckets):
        members = [gradients[position] for position in bucket.members]
        tensors = [members[0].values, members[0].indices] if bucket.sparse else members
        with tf.control_dependencies(previous):
            outputs = _host_call(reducer, plan, index, tensors, samples, synchronize)
        previous = [outputs[0]] if not tf.executing_eagerly() else []
        if bucket.sparse:
            outputs[0].set_shape([None, *members[0].values.shape[1:]])
            outputs[1].set_shape([None])
            slices = tf.IndexedSlices(outputs[0], outputs[1], members[0].dense_shape)
            results[bucket.members[0]] = slices
            continue
        for position, output, member in zip(bucket.members, outputs, members, strict=True):
            output.set_shape(member.shape)
            results[position] = output
    return results


def _host_call(
    reducer: Reducer,
    plan: BucketPlan,
    index: int,
    tensors: Sequence[tf.Tensor],
    samples: tf.Tensor,
    synchronize: Callable[[], bool] | None,
) -> list[tf.Tensor]:
    if tf.executing_eagerly():
        arrays = reducer.exchange(plan, index, [t.numpy() for t in tensors], float(samples), synchronize)
        return [tf.convert_to_tensor(array) for array in arrays]

    @tf.autograph.experimental.do_not_convert
    def call(count: np.float64, *arrays: Any) -> list[Any]:
        return reducer.exchange(plan, index, arrays, float(count), synchronize)

    with tf.device("CPU:0"):
        outputs = tf.numpy_function(call, [samples, *tensors], [t.dtype for t in tensors])
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
