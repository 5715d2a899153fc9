"""The mean of gradients inside a TensorFlow graph, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from mpitrain.collectives.engine import Averaging, CollectiveEngine
from mpitrain.errors import AgreedError
from mpitrain.reduction.buckets import ITEM_BYTES, BucketPlan, TensorSpec, alone_bytes_for, plan_buckets
from mpitrain.reduction.compressor import COMPRESSORS, State
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
    compiled: bool = False,
) -> BucketPlan:
    """Local: how these gradients are exchanged between ranks on so many hosts; see `UpdateCall` for the rest."""
    specs = [spec_of(g, v, half) for g, v in zip(gradients, variables, strict=True)]
    return plan_buckets(specs, alone_bytes=alone_bytes_for(hosts), title=title, added_up=added_up, compiled=compiled)


@tf.autograph.experimental.do_not_convert
def mean_gradients(
    engine: CollectiveEngine,
    reducer: Reducer,
    plan: BucketPlan,
    gradients: Sequence[Gradient],
    samples: Any,
    synchronize: Callable[[], bool] | None = None,
    compression: str = "none",
    states: list[State] | None = None,
) -> list[Gradient]:
    """Collective: the mean of `gradients` over the samples of all ranks, or their sum, as the plan says.

    Works eagerly and while a `tf.function` is traced. All ranks exchange the buckets in the same order, one at a
    time, while the backward pass of earlier layers goes on.

    Args:
        engine: moves tensors between the ranks.
        reducer: the host's side of each update.
        plan: of these gradients, the same on all ranks.
        gradients: dense or `IndexedSlices`; no None.
        samples: number (or scalar tensor) of samples behind this rank's gradients.
        synchronize: see `Reducer.exchange`. The mean of the last gradient is there once it has returned.
        compression: name of the compressor of dense gradients.
        states: what it remembers of each bucket, replaced by what it is to remember then; None where it is new.
    """
    if engine.library is not None:
        reducer.use(engine.library)
    results: list[Gradient] = list(gradients)
    compressor = COMPRESSORS[compression]
    if states is None:
        states = [compressor.init([plan.specs[position] for position in bucket.members]) for bucket in plan.buckets]

    def average(averaging: Averaging) -> None:
        for index, bucket in enumerate(plan.buckets):
            members = [gradients[position] for position in bucket.members]
            if bucket.sparse:
                means: Sequence[Gradient] = [
                    _slices(averaging.mean([members[0].values, members[0].indices]), members[0])
                ]
            else:
                means, _, states[index] = compressor.exchange(members, states[index], averaging)
            for position, gradient, mean in zip(bucket.members, members, means, strict=True):
                if not bucket.sparse:
                    # Of what a call of Python returns, TensorFlow knows no shape.
                    mean.set_shape(gradient.shape)
                results[position] = mean

    engine.average(reducer.host_side(plan, synchronize), plan.buckets, tf.cast(samples, tf.float64), average)
    return results


def _slices(rows: Sequence[tf.Tensor], gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Local: rows of the mean as `IndexedSlices`, with the static shapes of this rank's own."""
    values, indices = rows
    values.set_shape([None, *gradient.values.shape[1:]])
    indices.set_shape([None])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
