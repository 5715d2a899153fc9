"""The engine `native`: gradients are exchanged by machine code, all else as the engine `host` does it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives import host
from mpitrain.collectives.bucket import Bucket
from mpitrain.collectives.conversion import compiled_function, refuse_compiled
from mpitrain.collectives.engine import Averaging, Capabilities, HostSide
from mpitrain.collectives.host import CollectiveCall, Reduction
from mpitrain.collectives.host_engine import HostAveraging, HostEngine
from mpitrain.collectives.native_session import MOST_PLANS, TRAVELS, NativePlan, NativeSession
from mpitrain.collectives.ordering import in_turn, with_turn
from mpitrain.comm.communicator import Buffer, Communicator
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.native import operation, program
from mpitrain.native.library import Library, library
from mpitrain.world import engine_choice
from mpitrain.world.world import World

HALVES = ("float16", "bfloat16")


def usable(world: World) -> Library | str:
    """Local: the machine code that these ranks can use, or why they cannot."""
    communicator = world.communicator
    reason = engine_choice.obstacle(communicator)
    if reason is not None:
        return reason
    assert isinstance(communicator, MpiCommunicator)
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
            raise engine_choice.unusable(found)
        self.library: Library = found
        self._sample: tf.Tensor | None = None  # made later: the engine may be made while a graph is traced
        self._session: NativeSession | None = None
        self._plans: dict[Any, NativePlan] = {}

    def all_reduce(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        eagerly = tf.executing_eagerly()
        # Sessions of TensorFlow 1 run parts of a graph, so that ranks negotiate what is next.
        in_order = eagerly or tf.compat.v1.executing_eagerly_outside_functions()
        if how.op not in ("sum", "mean") or not (in_order and (eagerly or tensor.shape.is_fully_defined())):
            return super().all_reduce(tensor, how, name)
        key = tensor.dtype, tuple(tensor.shape), how, name
        plan = self._plans.get(key) or self._plan(*key)
        if plan is None or not (eagerly or compiled_function() is None):
            return super().all_reduce(tensor, how, name)
        if not eagerly:
            one = tf.constant(1.0, tf.float64)
            exchange = functools.partial(operation.exchange, self.library, plan, 0, one, [tensor])
            return in_turn(self._world.communicator, exchange)[0]
        if self._sample is None:
            self._sample = tf.constant(1.0, tf.float64)
        return operation.exchange(self.library, plan, 0, self._sample, [tensor])[0]

    def _plan(self, dtype: tf.DType, shape: tuple[int, ...], how: Reduction, name: str | None) -> NativePlan | None:
        """Local: of an all-reduce; None where machine code cannot do it."""
        travels = dtype.name if dtype.name not in HALVES else "float32"
        if travels not in TRAVELS or not how.before == how.after == 1.0 or (how.half and dtype.name in HALVES):
            return None
        world = self._world
        assert isinstance(world.communicator, MpiCommunicator)
        if self._session is None:
            self._session = NativeSession(self.library, world.communicator, world.agreement, world.all_reduce)
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        call = host.call_of("all_reduce", np.dtype(dtype.as_numpy_dtype), shape, name, how)
        size = math.prod(shape)
        one = _OneTensor(
            call, (_Tensor(size, shape, dtype.name),), (Bucket((0,), (0,), size, travels),), how.op == "sum"
        )

        def python(index: int, arrays: Sequence[Buffer], samples: float, gathered: bool = False) -> list[Buffer]:
            with world.agreement.turn.handed_over() if gathered else world.agreement.turn:
                result = host.all_reduce(world, arrays[0], how, name, gathered)
                if world.agreement.observer is not None:
                    world.agreement.observer.ended()
            own.struct.ready = True
            return [result]

        own = self._plans[dtype, shape, how, name] = self._session.of(one, python)
        return own

    @functools.cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What it can do; whether XLA can call it is tried out when first asked."""
        # A program that fails has given away the memory of the variables, and those that are left go on from these.
        can_fail = "ranks may be lost while others go on" if self._world.communicator.can_shrink else None
        return replace(HostEngine.capabilities, not_in_xla=can_fail or program.refused(self.library))

    def average(
        self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor, body: Callable[[Averaging], None]
    ) -> None:
        if tf.executing_eagerly() or compiled_function() is None:
            super().average(exchange, buckets, samples, body)
            return
        update = getattr(exchange, "native", None)
        reason = self.capabilities.not_in_xla
        if update is None or None in update.addresses or reason is not None:
            refuse_compiled(reason or "Python exchanges a part of them")
        body(_CompiledAveraging(self, self._world.communicator, update, samples))

    def averaging(self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor) -> HostAveraging:
        return _NativeAveraging(self, exchange, buckets, samples)


@dataclass(frozen=True)
class _Tensor:
    """A `Spec`."""

    size: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _OneTensor:
    """The `Plan` of one all-reduce."""

    call: CollectiveCall
    specs: tuple[_Tensor, ...]
    buckets: tuple[Bucket, ...]
    added_up: bool

    def describe_bucket(self, index: int) -> str:
        """Local: for the watchdog."""
        return str(self.call)


class _NativeAveraging(HostAveraging):
    """One update; what machine code cannot sum, such as rows, is a call of the host's side."""

    def mean_of(self, index: int, bucket: Bucket, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        update = getattr(self._exchange, "native", None)
        if update is None or update.addresses[index] is None:
            return super().mean_of(index, bucket, tensors)
        assert isinstance(self.engine, NativeEngine)
        with tf.control_dependencies(self.last):
            means = operation.exchange(self.engine.library, update, index, self._samples, tensors)
        self.last = means[:1]
        return means


class _CompiledAveraging(Averaging):
    """One update in a program of XLA, each bucket a call of machine code, in turn by data."""

    def __init__(self, engine: NativeEngine, communicator: Communicator, update: Any, samples: tf.Tensor) -> None:
        self.engine = engine
        self._communicator, self._update, self._samples = communicator, update, samples
        self._next = itertools.count()

    def mean(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        update, index, means = self._update, next(self._next), []
        specs = [update.plan.specs[position] for position in update.plan.buckets[index].members]
        shaped = [(spec.dtype, spec.shape) for spec in specs]

        def call(turn: tf.Tensor) -> tf.Tensor:
            following, found = program.exchange(update, index, turn, self._samples, tensors, shaped)
            means.extend(found)
            return following

        with_turn(self._communicator, call)
        return means

    def share(self) -> tf.Tensor:
        refuse_compiled()
        raise NotImplementedError
