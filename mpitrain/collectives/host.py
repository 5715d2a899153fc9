"""Collectives on numpy arrays that first agree on what is called, so that a mistake raises on every rank."""

from __future__ import annotations

from typing import Any

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
    if result.dtype.kind == "b":
        result = _reduce_bool(world, result, op)
    elif op in ("sum", "mean"):
        wide = result.astype(_wide(result.dtype, op), copy=False)
        exact = wide.dtype.kind in "iu"
        world.all_reduce.sum(wide, wide, 1.0 / world.size if op == "mean" and not exact else 1.0)
        result = (wide // world.size if op == "mean" and exact else wide).astype(result.dtype, copy=False)
    else:
        world.communicator.all_reduce(result, op)  # type: ignore[arg-type]
    return result.reshape(array.shape)


def _reduce_bool(world: World, array: Buffer, op: str) -> Buffer:
    """Collective: `sum` and `max` are whether any is true, the others whether all are."""
    bits = array.astype(np.uint8)
    world.communicator.all_reduce(bits, "max" if op in ("sum", "max") else "min")
    return bits.astype(np.bool_)


def _wide(dtype: np.dtype[Any], op: str) -> Any:
    """The dtype in which a sum is taken: half precisions lose too much, means of small integers overflow."""
    if dtype.kind in "iu":
        return dtype if op == "sum" else np.uint64 if dtype.kind == "u" else np.int64
    return np.float32 if dtype.itemsize == 2 else dtype


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
    valid = splits.shape == (world.size,) and bool((splits >= 0).all()) and int(splits.sum()) == array.shape[0]
    world.agreement.call(f"all_to_all of {_form(array, rows_differ=True)}")
    counts = _gather_counts(world, splits if valid else np.full(world.size, -1))
    bad = [rank for rank in range(world.size) if (counts[rank] < 0).any()]
    if bad:
        own = f"; this rank gave {splits.tolist()} for {array.shape[0]} rows" if not valid else ""
        raise ValueError(
            f"splits must be {world.size} numbers of rows that add up to all rows: not so on ranks {bad}{own}"
        )
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
