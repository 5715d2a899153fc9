"""The engine `native`: gradients are exchanged by machine code, all else as the engine `host` does it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mpitrain.collectives.bucket import Bucket
from mpitrain.collectives.engine import HostSide
from mpitrain.collectives.host_engine import HostAveraging, HostEngine
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.errors import UsageError
from mpitrain.native import operation
from mpitrain.native.library import Library, library
from mpitrain.world.world import World


def usable(world: World) -> Library | str:
    """Local: the machine code that these ranks can use, or why they cannot."""
    communicator = world.communicator
    if not isinstance(communicator, MpiCommunicator):
        return "no MPI connects these ranks"
    if communicator.can_shrink:
        return "ranks may be lost while others go on"
    if communicator.thread_level != "multiple":
        return f"this MPI lets no other thread in (its level is {communicator.thread_level})"
    return library(communicator.file)


class NativeEngine(HostEngine):
    """Each bucket is one operation, whose kernel needs neither Python nor its lock in the usual course of things.

    Raises:
        UsageError: there is no machine code that can be used here.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        found = usable(world)
        if isinstance(found, str):
            raise UsageError(f"gradients cannot be exchanged by machine code: {found}")
        self.library: Library = found

    def averaging(self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor) -> HostAveraging:
        return _NativeAveraging(self, exchange, buckets, samples)


class _NativeAveraging(HostAveraging):
    """One update; what machine code cannot sum, such as rows, is a call of the host's side."""

    def _mean(self, index: int, bucket: Bucket, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        update = getattr(self._exchange, "native", None)
        if update is None or update.addresses[index] is None:
            return super()._mean(index, bucket, tensors)
        assert isinstance(self.engine, NativeEngine)
        with tf.control_dependencies(self.last):
            means = operation.exchange(self.engine.library, update.addresses[index], update, self._samples, tensors)
        self.last = means[:1]
        return means
