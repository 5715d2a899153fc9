"""Horovod's collectives on tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mpitrain.collectives import operations as collectives
from mpitrain.errors import MismatchError
from mpitrain.horovod.basics import (
    OPERATIONS,
    Average,
    Sum,
    check_process_set,
    global_process_set,
    operation,
    rank,
    size,
    world,
)


class Compression:
    """How tensors travel: `none`, or `fp16`, which rounds floating-point tensors to half precision."""

    class none:  # noqa: N801 (the field's name)
        """As they are."""

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            """Local: the tensor, and what `decompress` needs."""
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            """Local: the tensor again."""
            return tensor

    class fp16:  # noqa: N801 (the field's name)
        """Rounded to float16."""

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            """Local: the rounded tensor, and its own dtype."""
            return (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            """Local: in its own dtype again."""
            return tensor if ctx is None else tf.cast(tensor, ctx)


def _told(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Collective: what ranks call differently is the error that Horovod raises."""
    try:
        return call(*args, **kwargs, world=world())
    except MismatchError as error:
        raise tf.errors.FailedPreconditionError(None, None, str(error)) from error


def _reduced(tensor: Any, op: int) -> Any:
    """Collective: `all_reduce`; the gradient of a sum is the sum of gradients, of a mean their mean."""

    @tf.custom_gradient
    def reduce(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return _reduced(upstream, op)

        return _told(collectives.all_reduce, own, OPERATIONS[op]), gradient

    return reduce(tensor)


def _scaled(tensor: Any, factor: float) -> Any:
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)


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
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Collective: reduce a tensor, or `IndexedSlices` (Sum and Average), over all ranks.

    Raises:
        NotImplementedError: another reduction or a factor with `IndexedSlices`.
        tf.errors.FailedPreconditionError: eagerly, when ranks differ in shape, dtype or op.
    """
    check_process_set(process_set)
    op = operation(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if op not in (Average, Sum) or (prescale_factor, postscale_factor) != (1.0, 1.0):
            raise NotImplementedError("IndexedSlices can be summed and averaged only, without factors")
        values, indices = allgather(tensor.values), allgather(tensor.indices)
        values = _scaled(values, 1.0 / size()) if op == Average else values
        return tf.IndexedSlices(values, indices, tensor.dense_shape)
    small, context = compression.compress(_scaled(tf.convert_to_tensor(tensor), prescale_factor))
    return _scaled(compression.decompress(_reduced(small, op), context), postscale_factor)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Collective: `allreduce` of each."""
    options: dict[str, Any] = {"compression": compression, "op": operation(op, average), "process_set": process_set}
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return [allreduce(tensor, **options, **factors) for tensor in tensors]


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = global_process_set
) -> Any:
    """Collective: concatenate along the first axis; first dimensions may differ between ranks."""
    check_process_set(process_set)

    @tf.custom_gradient
    def gather(own: Any) -> Any:
        rows = tf.shape(tf.reshape(own, [-1]) if own.shape.rank == 0 else own)[:1]
        counts = _told(collectives.all_gather, rows)
        result = _told(collectives.all_gather, own)

        def gradient(upstream: Any) -> Any:
            start = tf.reduce_sum(counts[: rank()])
            part = _reduced(upstream, Sum)[start : start + counts[rank()]]
            return tf.reshape(part, tf.shape(own))

        return result, gradient

    return gather(tf.convert_to_tensor(tensor))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Collective: `allgather` of each."""
    return [allgather(tensor, process_set=process_set) for tensor in tensors]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Collective: rank `root_rank`'s tensor."""
    check_process_set(process_set)

    @tf.custom_gradient
    def send(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            total = _reduced(upstream, Sum)
            return total if rank() == root_rank else tf.zeros_like(total)

        return _told(collectives.broadcast, own, root_rank), gradient

    return send(tf.convert_to_tensor(tensor))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Sequence[Any]:
    """Collective: variables become those of rank `root_rank`, in place."""
    for variable in variables:
        variable.assign(broadcast(variable, root_rank, process_set=process_set))
    return variables


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Collective: send a run of rows to each rank; with `splits` also tell how many rows came from each."""
    check_process_set(process_set)

    @tf.custom_gradient
    def exchange(own: Any) -> Any:
        result, received = _told(collectives.all_to_all, own, splits)

        def gradient(upstream: Any, _: Any = None) -> Any:
            return _told(collectives.all_to_all, upstream, received)[0]

        return (result, received), gradient

    result, received = exchange(tf.convert_to_tensor(tensor))
    return result if splits is None else (result, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Collective: reduce, and keep this rank's rows; earlier ranks get one row more where they do not divide."""
    check_process_set(process_set)
    op = operation(op, None)

    @tf.custom_gradient
    def scatter(own: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return _scaled(allgather(upstream), 1.0 / size() if op == Average else 1.0)

        return _told(collectives.reduce_scatter, own, OPERATIONS[op]), gradient

    small, context = compression.compress(_scaled(tf.convert_to_tensor(tensor), prescale_factor))
    return _scaled(compression.decompress(scatter(small), context), postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Collective: `reducescatter` of each."""
    options: dict[str, Any] = {"compression": compression, "op": op, "process_set": process_set}
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return [reducescatter(tensor, **options, **factors) for tensor in tensors]
