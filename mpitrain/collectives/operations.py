"""Collectives on tensors, eagerly and inside `tf.function`.

Inside a graph each is one stateful host call; TensorFlow runs those of one graph in the order in which they were
traced, so all ranks call them in the same order. In a graph of TensorFlow 1 the ranks negotiate the order when a
session runs it. Before each, ranks agree on operation, dtype and shape: a difference raises on every rank, in a graph
as `tf.errors.FailedPreconditionError`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mpitrain.collectives.host import Reduction
from mpitrain.collectives.objects import check_root
from mpitrain.collectives.registry import engine_of
from mpitrain.world.start import current_world
from mpitrain.world.world import World


def all_reduce(
    tensor: Any,
    op: str = "mean",
    *,
    before: float = 1.0,
    after: float = 1.0,
    half: bool = False,
    name: str | None = None,
    world: World | None = None,
) -> tf.Tensor:
    """Collective: reduce a tensor of equal shape and dtype over all ranks.

    Args:
        tensor: any shape; numeric or bool.
        op: `mean`, `sum`, `min`, `max`, `product` or, of floating-point tensors on a number of ranks that is a
            power of two, `adasum` (see `comm.adasum`). The mean of integers is rounded towards zero, that of
            bool is whether all are true; their sum is whether any is.
        before: factor on each rank's tensor; integers are multiplied in double precision and rounded towards zero.
        after: factor on the result.
        half: sum half precisions as they are, instead of in single precision.
        name: for messages; the same on all ranks.
        world: the job, or a group of its ranks.

    Returns:
        The same shape and dtype, the same bits on all ranks.

    Raises:
        ValueError: unknown `op`, or one that this dtype has not.
        MismatchError: ranks differ in operation, shape, dtype, factors or name.

    Example:
        >>> mpitrain.all_reduce([1.0, 2.0], "sum").numpy().tolist()
        [1.0, 2.0]
    """
    group = world or current_world()
    tensor = exchangeable(tensor)
    check_op(op, tensor.dtype)
    result = engine_of(group).all_reduce(tensor, Reduction(op, before, after, half), name)
    _set_shape(result, tensor.shape)
    return result


def all_gather(tensor: Any, *, name: str | None = None, world: World | None = None) -> tf.Tensor:
    """Collective: concatenate along the first axis, in rank order.

    Args:
        tensor: (n, ...); n may differ between ranks, the rest may not. A scalar counts as (1,).
        name: for messages; the same on all ranks.
        world: the job, or a group of its ranks.

    Returns:
        (sum of n, ...).

    Example:
        >>> mpitrain.all_gather([[1, 2]]).shape
        TensorShape([1, 2])
    """
    group = world or current_world()
    tensor = exchangeable(tensor)
    result = engine_of(group).all_gather(tensor, name)
    _set_shape(result, _rows_shape(tensor))
    return result


def broadcast(tensor: Any, root: int = 0, *, name: str | None = None, world: World | None = None) -> tf.Tensor:
    """Collective: rank `root`'s tensor.

    Args:
        tensor: of equal shape and dtype on all ranks.
        root: the rank.
        name: for messages; the same on all ranks.
        world: the job, or a group of its ranks.

    Example:
        >>> mpitrain.broadcast([3], root=0).numpy().tolist()
        [3]
    """
    group = world or current_world()
    check_root(root, group)
    tensor = exchangeable(tensor)
    result = engine_of(group).broadcast(tensor, root, name)
    _set_shape(result, tensor.shape)
    return result


def reduce_scatter(
    tensor: Any,
    op: str = "mean",
    *,
    before: float = 1.0,
    after: float = 1.0,
    half: bool = False,
    name: str | None = None,
    world: World | None = None,
) -> tf.Tensor:
    """Collective: reduce over ranks, and keep this rank's part of the first axis.

    Args:
        tensor: (n, ...), equal on all ranks in shape and dtype. Where n does not divide by the number of
            ranks, earlier ranks get one row more.
        op: as for `all_reduce`.
        before: as for `all_reduce`.
        after: as for `all_reduce`.
        half: as for `all_reduce`.
        name: for messages; the same on all ranks.
        world: the job, or a group of its ranks.

    Raises:
        ValueError: the tensor is a scalar, or `op` does not fit.

    Example:
        >>> mpitrain.reduce_scatter([[1.0], [2.0]]).numpy().tolist()
        [[1.0], [2.0]]
    """
    group = world or current_world()
    tensor = exchangeable(tensor)
    check_op(op, tensor.dtype)
    check_rows(tensor)
    result = engine_of(group).reduce_scatter(tensor, Reduction(op, before, after, half), name)
    _set_shape(result, _rows_shape(tensor))
    return result


def all_to_all(
    tensor: Any, splits: Any = None, *, name: str | None = None, world: World | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Collective: send a run of rows to each rank.

    Args:
        tensor: (n, ...); n may differ between ranks.
        splits: (size,) rows for each rank, adding up to n; equal parts by default, into which n must divide.
        name: for messages; the same on all ranks.
        world: the job, or a group of its ranks.

    Returns:
        The rows received, in rank order, and (size,) int32, how many came from each rank.

    Raises:
        ValueError: `splits` does not add up.

    Example:
        >>> rows, counts = mpitrain.all_to_all([[1], [2]])
        >>> rows.numpy().tolist(), counts.numpy().tolist()
        ([[1], [2]], [2])
    """
    group = world or current_world()
    tensor = exchangeable(tensor)
    splits = None if splits is None else tf.cast(splits, tf.int64)
    result, received = engine_of(group).all_to_all(tensor, splits, name)
    _set_shape(result, _rows_shape(tensor))
    _set_shape(received, [group.size])
    return result, received


def check_op(op: str, dtype: tf.DType) -> None:
    """Local: refuse a reduction that is unknown, or that this dtype has not.

    Raises:
        ValueError: with what there is.
    """
    if op not in ("mean", "sum", "min", "max", "product", "adasum"):
        raise ValueError(f"op must be mean, sum, min, max, product or adasum, not {op!r}")
    if op == "adasum" and not dtype.is_floating:
        raise ValueError(f"adasum is for floating-point tensors, not {dtype.name}")
    if dtype.is_complex and op in ("min", "max"):
        raise ValueError(f"complex numbers have no {op}; reduce their real and imaginary parts")


def check_rows(tensor: tf.Tensor) -> None:
    """Local: refuse to scatter a scalar.

    Raises:
        ValueError: it is one.
    """
    if tensor.shape.rank == 0:
        raise ValueError("reduce_scatter needs a tensor with a first axis, not a scalar")


def _rows_shape(tensor: tf.Tensor) -> tf.TensorShape:
    """The static shape of a tensor with another number of rows."""
    shape = tensor.shape
    return tf.TensorShape(None) if shape.rank is None else tf.TensorShape([None, *shape[1:]])


def exchangeable(value: Any) -> tf.Tensor:
    """Local: a tensor that can be exchanged.

    Raises:
        ValueError: it has no numbers.
    """
    tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        raise ValueError(f"a tensor of {dtype.name} cannot be exchanged; give numbers or bool")
    return tensor


def _set_shape(result: tf.Tensor, shape: Any) -> None:
    """Local: what is known of the shape of a result in a graph; outside it has one."""
    if not hasattr(result, "numpy"):
        result.set_shape(shape)
