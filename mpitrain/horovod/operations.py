"""Horovod's collectives on tensors, with their gradients.

The gradient of a reduction is the same reduction of the gradients. Those of a gathered and of a broadcast tensor are
averaged over the ranks, not summed, as Horovod has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from mpitrain.collectives import operations as collectives
from mpitrain.horovod.basics import OPERATIONS, Adasum, Average, Sum, operation
from mpitrain.horovod.compression import Compression
from mpitrain.horovod.process_sets import ProcessSet, global_process_set, member, position, told
from mpitrain.world.world import World

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


@dataclass(frozen=True)
class _Reduction:
    """What `allreduce` and `reducescatter` have in common."""

    world: World
    op: int
    before: float
    after: float
    compression: Any
    name: str | None

    def options(self) -> dict[str, Any]:
        return {
            "op": OPERATIONS[self.op],
            "before": self.before,
            "after": self.after,
            "half": self.compression is not Compression.none,
            "name": self.name,
            "world": self.world,
        }


def _with_gradient(function: Callable[[Any], tuple[Any, Any]], tensor: tf.Tensor) -> Any:
    """Collective: the result of `function`, which gives its gradient too; that takes time only where a tape records."""
    if not record.could_possibly_record() and tf.executing_eagerly():
        return function(tensor)[0]
    return tf.custom_gradient(function)(tensor)


def _reduced(tensor: tf.Tensor, how: _Reduction) -> Any:
    """Collective: `all_reduce` with its gradient."""

    def reduce(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return _reduced(upstream, how)

        return told(collectives.all_reduce, own, **how.options()), gradient

    return _with_gradient(reduce, tensor)


def _scattered(tensor: tf.Tensor, how: _Reduction) -> Any:
    """Collective: `reduce_scatter` with its gradient."""

    def scatter(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            factor = how.before * how.after * (how.world.size if how.op == Sum else 1)
            return told(collectives.all_gather, upstream * tf.cast(factor, upstream.dtype), world=how.world)

        return told(collectives.reduce_scatter, own, **how.options()), gradient

    return _with_gradient(scatter, tensor)


def _mean(tensor: tf.Tensor, world: World) -> Any:
    return _reduced(tensor, _Reduction(world, Average, 1.0, 1.0, Compression.none, None))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Collective: reduce a tensor, or `IndexedSlices` (Sum and Average), over all ranks of the process set.

    Raises:
        NotImplementedError: another reduction or a factor with `IndexedSlices`, or Adasum that is not possible.
        tf.errors.FailedPreconditionError: when ranks differ in shape, dtype, op, factors or name.
        tf.errors.InvalidArgumentError: this rank is not in the process set.
    """
    op = operation(op, average)
    how = _Reduction(member(process_set), op, prescale_factor, postscale_factor, compression, name)
    return _allreduced(_reducible(tensor, how, process_set), how, process_set)


def _reducible(tensor: Any, how: _Reduction, process_set: ProcessSet) -> Any:
    """Local: a tensor, or `IndexedSlices`, to which nothing stands in the way but other ranks.

    Raises:
        NotImplementedError: another reduction or a factor with `IndexedSlices`, or Adasum that is not possible.
        tf.errors.InvalidArgumentError: this dtype has not that reduction.
    """
    if isinstance(tensor, tf.IndexedSlices):
        if how.op not in (Average, Sum) or (how.before, how.after) != (1.0, 1.0):
            raise NotImplementedError("IndexedSlices can be summed and averaged only, without factors")
        return tensor
    if how.op == Adasum:
        _check_adasum(how.world, process_set)
    tensor = told(collectives.exchangeable, tensor)
    told(collectives.check_op, OPERATIONS[how.op], tensor.dtype)
    return tensor


def _allreduced(tensor: Any, how: _Reduction, process_set: ProcessSet) -> Any:
    """Collective: the reduction of a tensor that can be reduced."""
    if isinstance(tensor, tf.IndexedSlices):
        # Rows that several ranks have stand there several times; they are added up where they are applied.
        values = allgather(tensor.values, process_set=process_set)
        indices = allgather(tensor.indices, process_set=process_set)
        values = values / tf.cast(how.world.size, values.dtype) if how.op == Average else values
        return tf.IndexedSlices(values, indices, tensor.dense_shape)
    small, context = how.compression.compress(tensor)
    return how.compression.decompress(_reduced(small, how), context)


def _check_adasum(world: World, process_set: ProcessSet) -> None:
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum is for all ranks only, not for a process set")
    if world.size & (world.size - 1):
        raise NotImplementedError(f"Adasum needs a number of ranks that is a power of two, not {world.size}")


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Collective: `allreduce` of each, once all are found to be possible."""
    op, world = operation(op, average), member(process_set)
    ways = [
        _Reduction(world, op, prescale_factor, postscale_factor, compression, _numbered(name, index))
        for index in range(len(tensors))
    ]
    # Before the first is exchanged: a rank that raised between two of them would leave the others waiting.
    found = [_reducible(tensor, how, process_set) for tensor, how in zip(tensors, ways, strict=True)]
    return [_allreduced(tensor, how, process_set) for tensor, how in zip(found, ways, strict=True)]


def _numbered(name: str | None, index: int) -> str | None:
    return None if name is None else f"{name}.{index}"


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Collective: concatenate along the first axis; first dimensions may differ between ranks."""
    world = member(process_set)

    def gather(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            rows = tf.shape(tf.reshape(own, [-1]) if own.shape.rank == 0 else own)[:1]
            counts = told(collectives.all_gather, rows, world=world)
            start = tf.reduce_sum(counts[: world.rank])
            part = _mean(upstream, world)[start : start + counts[world.rank]]
            return tf.reshape(part, tf.shape(own))

        return told(collectives.all_gather, own, name=name, world=world), gradient

    return _with_gradient(gather, tf.convert_to_tensor(tensor))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Collective: `allgather` of each."""
    found = [told(collectives.exchangeable, tensor) for tensor in tensors]
    return [allgather(tensor, _numbered(name, index), process_set=process_set) for index, tensor in enumerate(found)]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Collective: the tensor of global rank `root_rank`, which is in the process set."""
    world = member(process_set)
    root = position(process_set, root_rank)

    def send(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            mean = _mean(upstream, world)
            if world.rank == root:
                return mean
            with tf.control_dependencies([mean]):  # else a session would leave out what this rank does not need
                return tf.zeros_like(mean)

        return told(collectives.broadcast, own, root, name=name, world=world), gradient

    return _with_gradient(send, tf.convert_to_tensor(tensor))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collective: variables become those of rank `root_rank`, in place; their new values.

    Raises:
        ValueError: not all are variables.
    """
    values = []
    if not all(hasattr(variable, "assign") for variable in variables):
        raise ValueError("broadcast_ takes variables; give tensors to broadcast")
    for index, variable in enumerate(variables):
        value = broadcast(variable, root_rank, _numbered(name, index), process_set=process_set)
        assigned = variable.assign(value)
        with tf.control_dependencies([] if tf.executing_eagerly() or assigned is None else [assigned]):
            values.append(tf.identity(value))
    return values


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Collective: send a run of rows to each rank; with `splits` also tell how many rows came from each.

    Raises:
        ValueError: `splits` are no whole numbers.
        tf.errors.InvalidArgumentError: on every rank: they do not add up to all rows, or without them the rows do not
            divide by the number of ranks.
    """
    world = member(process_set)
    if splits is not None:
        splits = tf.convert_to_tensor(splits)
        if not splits.dtype.is_integer:
            raise ValueError(f"splits must be whole numbers, not {splits.dtype.name}")

    def exchange(own: Any) -> Any:
        result, received = told(collectives.all_to_all, own, splits, name=name, world=world)

        def gradient(upstream: Any, _: Any = None) -> Any:
            return told(collectives.all_to_all, upstream, received, world=world)[0]

        return (result, received), gradient

    result, received = _with_gradient(exchange, tf.convert_to_tensor(tensor))
    return result if splits is None else (result, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Collective: reduce, and keep this rank's rows; earlier ranks get one row more where they do not divide.

    Raises:
        NotImplementedError: Adasum.
        tf.errors.InvalidArgumentError: the tensor is a scalar.
    """
    if operation(op, None) == Adasum:
        raise NotImplementedError("Adasum is for allreduce only")
    how = _Reduction(member(process_set), op, prescale_factor, postscale_factor, compression, name)
    small, context = compression.compress(_scatterable(tensor, how, process_set))
    return compression.decompress(_scattered(small, how), context)


def _scatterable(tensor: Any, how: _Reduction, process_set: ProcessSet) -> Any:
    """Local: as `_reducible`, with rows.

    Raises:
        tf.errors.InvalidArgumentError: it is a scalar.
    """
    found = _reducible(tf.convert_to_tensor(tensor), how, process_set)
    told(collectives.check_rows, found)
    return found


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Collective: `reducescatter` of each, once all are found to be possible."""
    how = _Reduction(member(process_set), operation(op, None), prescale_factor, postscale_factor, compression, None)
    found = [_scatterable(tensor, how, process_set) for tensor in tensors]
    one = functools.partial(
        reducescatter,
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return [one(tensor) for tensor in found]
