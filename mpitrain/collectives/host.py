"""Collectives on numpy arrays that first agree on what is called, so that a mistake raises on every rank."""

from __future__ import annotations

import numpy as np

from mpitrain.comm.communicator import Buffer, Op
from mpitrain.comm.world import World


def _form(array: Buffer, rows_differ: bool = False) -> str:
    shape = ["*", *array.shape[1:]] if rows_differ else list(array.shape)
    return f"{array.dtype.name}[{', '.join(map(str, shape))}]"


def _contiguous(array: Buffer) -> Buffer:
    return np.ascontiguousarray(array).reshape(array.shape)


def all_reduce(world: World, array: Buffer, op: Op | str) -> Buffer:
    """Collective: sum, mean, min, max or product over ranks, of equal shapes."""
    world.agreement.call(f"all_reduce({op}) of {_form(array)}")
    result = np.array(array, order="C", ndmin=1).reshape(-1)
    if op in ("sum", "mean"):
        half = result.dtype.itemsize == 2 and result.dtype.kind in "fV"
        summed = result.astype(np.float32) if half else result
        scale = 1.0 / world.size if op == "mean" and summed.dtype.kind in "fc" else 1.0
        world.all_reduce.sum(summed, summed, scale)
        if op == "mean" and summed.dtype.kind not in "fc":
            summed = summed // world.size
        result = summed.astype(result.dtype, copy=False)
    else:
        world.communicator.all_reduce(result, op)  # type: ignore[arg-type]
    return result.reshape(array.shape)


def all_gather(world: World, array: Buffer) -> Buffer:
    """Collective: concatenation along the first axis, in rank order; first dimensions may differ."""
    array = np.atleast_1d(array)
    world.agreement.call(f"all_gather of {_form(array, rows_differ=True)}")
    counts = _gather_counts(world, [array.shape[0]])[:, 0]
    row = int(np.prod(array.shape[1:], dtype=np.int64))
    result = np.empty((int(counts.sum()), *array.shape[1:]), array.dtype)
    world.communicator.all_gather_v(_contiguous(array), result, [int(count) * row for count in counts])
    return result


def broadcast(world: World, array: Buffer, root: int) -> Buffer:
    """Collective: rank `root`'s array."""
    world.agreement.call(f"broadcast from rank {root} of {_form(array)}")
    result = np.array(array, order="C", ndmin=1)
    world.communicator.broadcast(result, root)
    return result.reshape(array.shape)


def reduce_scatter(world: World, array: Buffer, op: Op | str) -> Buffer:
    """Collective: this rank's rows of the reduction; earlier ranks get one row more."""
    total = all_reduce(world, array, op)
    base, extra = divmod(array.shape[0], world.size)
    start = world.rank * base + min(world.rank, extra)
    return total[start : start + base + (world.rank < extra)]


def all_to_all(world: World, array: Buffer, splits: Buffer | None) -> tuple[Buffer, Buffer]:
    """Collective: send runs of rows to each rank; the rows received, and how many from each rank."""
    if splits is None:
        base, extra = divmod(array.shape[0], world.size)
        splits = np.array([base + (rank < extra) for rank in range(world.size)])
    world.agreement.call(f"all_to_all of {_form(array, rows_differ=True)}")
    counts = _gather_counts(world, splits)
    bad = [rank for rank in range(world.size) if (counts[rank] < 0).any()]
    if len(splits) != world.size or bad or int(np.sum(splits)) != array.shape[0]:
        raise ValueError(f"splits must be {world.size} numbers of rows that add up to {array.shape[0]}, got {splits}")
    received = counts[:, world.rank]
    row = int(np.prod(array.shape[1:], dtype=np.int64))
    result = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
    world.communicator.all_to_all_v(
        _contiguous(array), [int(n) * row for n in splits], result, [int(n) * row for n in received]
    )
    return result, received.astype(np.int32)


def barrier(world: World) -> None:
    """Collective: the header itself is the barrier."""
    world.agreement.call("barrier")


def _gather_counts(world: World, counts: Buffer | list[int]) -> Buffer:
    own = np.asarray(counts, np.int64)
    result = np.zeros((world.size, len(own)), np.int64)
    world.communicator.all_gather(own, result)
    return result
