"""Buckets inside a TensorFlow graph: one host call each, chained in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from mpitrain.collectives.ordering import host_call, in_turn
from mpitrain.errors import AgreedError
from mpitrain.reduction.buckets import ITEM_BYTES, BucketPlan, TensorSpec, alone_bytes_for, plan_buckets
from mpitrain.reduction.reducer import Reducer

Gradient: TypeAlias = Any  # tf.Tensor or tf.IndexedSlices


def spec_of(gradient: Gradient, variable: Any, half: bool = False) -> TensorSpec:
    """Local: what all ranks must agree on about one gradient; with `half` half precisions are summed as they are.

    Raises:
        AgreedError: it cannot be averaged; all ranks have the same.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    dtype = gradient.dtype.name
    if dtype not in ITEM_BYTES:
        raise AgreedError(
            f"the gradient of {name} is of {dtype}, and a mean over ranks needs one of {', '.join(ITEM_BYTES)}: "
            "cast it, or leave the variable out"
        )
    shapes = [tuple(shape) for shape in (variable.shape, gradient.shape) if getattr(shape, "rank", 0) is not None]
    shape = next((shape for shape in shapes if None not in shape), None)
    if shape is None:
        raise AgreedError(
            f"the shape of the gradient of {name} is not known while a graph is traced ({gradient.shape}), and ranks "
            "agree on it before they exchange: give it with tf.ensure_shape"
        )
    return TensorSpec(name, shape, dtype, isinstance(gradient, tf.IndexedSlices), half)


def plan_of(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    title: str,
    hosts: int,
    half: bool = False,
    added_up: bool = False,
) -> BucketPlan:
    """Local: how these gradients are exchanged between ranks on so many hosts; `added_up` or averaged."""
    specs = [spec_of(g, v, half) for g, v in zip(gradients, variables, strict=True)]
    return plan_buckets(specs, alone_bytes=alone_bytes_for(hosts), title=title, added_up=added_up)


@tf.autograph.experimental.do_not_convert
def mean_gradients(
    reducer: Reducer,
    plan: BucketPlan,
    gradients: Sequence[Gradient],
    samples: Any,
    synchronize: Callable[[], bool] | None = None,
) -> list[Gradient]:
    """Collective: the mean of `gradients` over the samples of all ranks, or their sum, as the plan says.

    Works eagerly and while a `tf.function` is traced. In a graph each bucket is one stateful
    host call, and control dependencies chain the calls: every rank makes them in the same order,
    one at a time, while the backward pass of earlier layers goes on.

    Args:
        reducer: does the exchange in host memory.
        plan: of these gradients, the same on all ranks.
        gradients: dense or `IndexedSlices`; no None.
        samples: number (or scalar tensor) of samples behind this rank's gradients.
        synchronize: see `Reducer.exchange`. The mean of the last gradient is there once it has returned.
    """
    results: list[Gradient] = list(gradients)
    samples = tf.cast(samples, tf.float64)

    def exchange_all() -> list[tf.Tensor]:
        last: list[tf.Tensor] = []
        for index, bucket in enumerate(plan.buckets):
            members = [gradients[position] for position in bucket.members]
            tensors = [members[0].values, members[0].indices] if bucket.sparse else members
            with tf.control_dependencies(last):
                outputs = _exchange(reducer, plan, index, tensors, samples, synchronize)
            last = [] if tf.executing_eagerly() else outputs[:1]
            if bucket.flat and len(outputs) == 1:
                outputs = _unpacked(outputs[0], tensors, [plan.specs[position].size for position in bucket.members])
            for position, mean in zip(bucket.members, _shaped(outputs, members, bucket.sparse), strict=True):
                results[position] = mean
        return last

    if tf.executing_eagerly():
        exchange_all()
    else:
        in_turn(reducer.communicator, exchange_all)
    return results


def _unpacked(flat: tf.Tensor, tensors: Sequence[tf.Tensor], sizes: Sequence[int]) -> list[tf.Tensor]:
    """Local: the members of a bucket that travelled as one tensor."""
    parts = tf.split(flat, sizes)
    return [tf.cast(tf.reshape(part, tf.shape(t)), t.dtype) for part, t in zip(parts, tensors, strict=True)]


def _shaped(outputs: Sequence[tf.Tensor], members: Sequence[Gradient], sparse: bool) -> Sequence[Gradient]:
    """Local: what came back from the host, with the static shapes of what went there."""
    if sparse:
        outputs[0].set_shape([None, *members[0].values.shape[1:]])
        outputs[1].set_shape([None])
        return [tf.IndexedSlices(outputs[0], outputs[1], members[0].dense_shape)]
    for output, member in zip(outputs, members, strict=True):
        output.set_shape(member.shape)
    return outputs


def _exchange(
    reducer: Reducer,
    plan: BucketPlan,
    index: int,
    tensors: Sequence[tf.Tensor],
    samples: tf.Tensor,
    synchronize: Callable[[], bool] | None,
) -> list[tf.Tensor]:
    if tf.executing_eagerly():
        arrays = reducer.exchange(plan, index, [np.asarray(t.numpy()) for t in tensors], float(samples), synchronize)
        return [tf.convert_to_tensor(array) for array in arrays]

    if plan.buckets[index].flat:
        dtype = plan.buckets[index].dtype
        tensors = [tf.concat([tf.cast(tf.reshape(tensor, [-1]), dtype) for tensor in tensors], 0)]

    def call(count: np.float64, *arrays: Any) -> list[Any]:
        return reducer.exchange(plan, index, arrays, float(count), synchronize)

    return host_call(call, [samples, *tensors], [t.dtype for t in tensors])
