"""The engine `one_rank`: there is nobody to exchange with, so nothing leaves the graph. An example of the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tensorflow as tf

from mpitrain.collectives.bucket import Bucket
from mpitrain.collectives.engine import Averaging, CollectiveEngine, HostSide
from mpitrain.collectives.host import Reduction
from mpitrain.collectives.host_engine import HostEngine
from mpitrain.world.world import World


class OneRankEngine(CollectiveEngine):
    """Every collective gives this rank's own."""

    capabilities = replace(HostEngine.capabilities, not_in_xla=None)

    def __init__(self, world: World) -> None:
        if world.size != 1:
            raise ValueError(f"the engine one_rank is for one rank, not {world.size}")

    def all_reduce(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        return _scaled(_scaled(tensor, how.before), how.after)

    def all_gather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tf.identity(tensor)

    def broadcast(self, tensor: tf.Tensor, root: int, name: str | None = None) -> tf.Tensor:
        return tf.identity(tensor)

    def reduce_scatter(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        return self.all_reduce(tensor, how, name)

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.identity(tensor), tf.shape(tensor)[:1]

    def average(
        self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor, body: Callable[[Averaging], None]
    ) -> None:
        body(_Own(self))


class _Own(Averaging):
    """An update of one rank."""

    def __init__(self, engine: OneRankEngine) -> None:
        self.engine = engine

    def mean(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.identity(tensor) for tensor in tensors]

    def share(self) -> tf.Tensor:
        return tf.constant(1.0, tf.float64)


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Local: as `operations.all_reduce` says of its factors."""
    if factor == 1.0:
        return tf.identity(tensor)
    wide = tf.float32 if tensor.dtype.size == 2 else tensor.dtype
    wide = tf.float64 if tensor.dtype.is_integer or tensor.dtype.is_bool else wide
    product = tf.cast(tensor, wide) * tf.cast(factor, wide)
    return tf.cast(tf.cast(product, tf.int64) if tensor.dtype.is_bool else product, tensor.dtype)
