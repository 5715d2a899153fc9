"""The engine `host`: tensors are handed to Python, and travel in the memory of the host."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives import host
from mpitrain.collectives.bucket import Bucket
from mpitrain.collectives.engine import Averaging, Capabilities, CollectiveEngine, HostSide
from mpitrain.collectives.host import Reduction
from mpitrain.collectives.negotiation import negotiation_of
from mpitrain.collectives.ordering import checked_call, host_call, in_turn
from mpitrain.world.world import World

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)


class HostEngine(CollectiveEngine):
    """Each collective is one call of Python from the graph.

    TensorFlow hands over its own memory, so that MPI reduces without a copy.
    """

    capabilities = Capabilities(
        frozenset({"CPU"}), frozenset(DTYPES), frozenset({"sum", "mean", "min", "max", "product", "adasum"})
    )

    def __init__(self, world: World) -> None:
        self._world = world

    def all_reduce(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        return self._one("all_reduce", name, tensor, lambda array: host.all_reduce(self._world, array, how, name))

    def all_gather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return self._one("all_gather", name, tensor, lambda array: host.all_gather(self._world, array, name))

    def broadcast(self, tensor: tf.Tensor, root: int, name: str | None = None) -> tf.Tensor:
        return self._one("broadcast", name, tensor, lambda array: host.broadcast(self._world, array, root, name))

    def reduce_scatter(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        return self._one(
            "reduce_scatter", name, tensor, lambda array: host.reduce_scatter(self._world, array, how, name)
        )

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:

        def call(array: Any, own_splits: Any = None) -> list[Any]:
            return [*host.all_to_all(self._world, array, own_splits, name)]

        inputs = [tensor] if splits is None else [tensor, splits]
        rows, received = self._call("all_to_all", name, inputs, [tensor.dtype, tf.int32], call)
        return rows, received

    def average(
        self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor, body: Callable[[Averaging], None]
    ) -> None:
        averaging = self.averaging(exchange, buckets, samples)
        if tf.executing_eagerly():
            body(averaging)
            return

        def trace() -> list[tf.Tensor]:
            body(averaging)
            return averaging.last

        in_turn(self._world.communicator, trace)

    def averaging(self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor) -> HostAveraging:
        """Local: how the buckets of one update are averaged."""
        return HostAveraging(self, exchange, buckets, samples)

    def _one(self, kind: str, name: str | None, tensor: tf.Tensor, function: Callable[[Any], Any]) -> tf.Tensor:
        return self._call(kind, name, [tensor], [tensor.dtype], lambda array: [function(array)])[0]

    @tf.autograph.experimental.do_not_convert
    def _call(
        self,
        kind: str,
        name: str | None,
        inputs: Sequence[tf.Tensor],
        dtypes: Sequence[tf.DType],
        function: Callable[..., list[Any]],
    ) -> list[tf.Tensor]:
        """Collective: the results of `function` on arrays, at once or as a node of the graph being built."""
        world = self._world

        def observed(*arrays: Any) -> list[Any]:
            results = function(*arrays)
            if world.agreement.observer is not None:
                world.agreement.observer.ended()
            return results

        if tf.executing_eagerly():
            return [tf.convert_to_tensor(array) for array in observed(*[tensor.numpy() for tensor in inputs])]
        # False in a graph of TensorFlow 1, which a session runs in parts and in no fixed order.
        if tf.compat.v1.executing_eagerly_outside_functions():
            return in_turn(world.communicator, lambda: checked_call(observed, inputs, dtypes))
        unique = tf.compat.v1.get_default_graph().unique_name(name or f"mpitrain_{kind}")
        negotiation = negotiation_of(world)
        return checked_call(lambda *arrays: negotiation.call(unique, lambda: observed(*arrays)), inputs, dtypes)


class HostAveraging(Averaging):
    """One update, each bucket one call of the host's side, and each waits for the one before."""

    def __init__(self, engine: HostEngine, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor) -> None:
        self.engine = engine
        self.last: list[tf.Tensor] = []  # in a graph, outputs of the latest call, for which the next one waits
        self._exchange, self._samples = exchange, samples
        self._next = enumerate(buckets)

    def mean(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self.mean_of(*next(self._next), tensors)

    def share(self) -> tf.Tensor:
        return self._call(next(self._next)[0], [], [tf.float64])[0]

    def mean_of(self, index: int, bucket: Bucket, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Collective: the mean of a bucket that is the next one."""
        if not bucket.flat or tf.executing_eagerly():
            return self._call(index, tensors, [tensor.dtype for tensor in tensors])
        sizes = [*map(operator.sub, (*bucket.offsets[1:], bucket.size), bucket.offsets)]
        with tf.control_dependencies(self.last):  # else all of an update would be copied at once
            joined = tf.concat([tf.cast(tf.reshape(tensor, [-1]), bucket.dtype) for tensor in tensors], 0)
        parts = tf.split(self._call(index, [joined], [joined.dtype])[0], sizes)
        return [tf.cast(tf.reshape(part, tf.shape(t)), t.dtype) for part, t in zip(parts, tensors, strict=True)]

    def _call(self, index: int, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        exchange = self._exchange
        if tf.executing_eagerly():
            arrays = exchange(index, [np.asarray(tensor.numpy()) for tensor in tensors], float(self._samples))
            return [tf.convert_to_tensor(array) for array in arrays]

        def call(count: np.float64, *arrays: Any) -> list[Any]:
            return exchange(index, arrays, float(count))

        with tf.control_dependencies(self.last):
            outputs = host_call(call, [self._samples, *tensors], dtypes)
        # One is enough: what a call gives is there at once.
        self.last = outputs[:1]
        return outputs
