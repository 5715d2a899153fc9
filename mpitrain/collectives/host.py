"""Collectives on numpy arrays that first agree on what is called, so that a mistake raises on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from mpitrain.comm import adasum
from mpitrain.comm.communicator import Buffer, Op, scale
from mpitrain.runtime.counted import counted
from mpitrain.world.calls import Call, Meeting
from mpitrain.world.world import World

IN_STEP = "in a step"  # so is named what every rank without data takes part in with nothing
SESSION_ROUND = Meeting("the next collective of a session")
Function = TypeVar("Function", bound=Callable[..., Any])
# What a rank without data puts in so that nothing changes; for sums and means that is 0.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "min": lambda dtype: np.inf if dtype.kind not in "iub" else True if dtype.kind == "b" else np.iinfo(dtype).max,
    "max": lambda dtype: -np.inf if dtype.kind not in "iub" else False if dtype.kind == "b" else np.iinfo(dtype).min,
    "product": lambda dtype: 1,
}


def _contiguous(array: Buffer) -> Buffer:
    return np.ascontiguousarray(array).reshape(array.shape)


def _in_turn(collective: Function) -> Function:
    """Local: what another thread of this rank calls waits until this is done."""

    @functools.wraps(collective)
    def call(world: World, *args: Any) -> Any:
        with world.agreement.turn:
            return collective(world, *args)

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class Reduction:
    """How arrays of all ranks become one."""

    op: Op | str  # `sum`, `mean`, `min`, `max`, `product` or `adasum`
    before: float = 1.0  # factor on each rank's array; integers are multiplied in double precision and cut
    after: float = 1.0  # factor on the result
    half: bool = False  # half precisions are summed as they are: half the bytes, and less exact

    def __str__(self) -> str:
        """Local: what all ranks must have in common."""
        before, after = (repr(float(factor)).removesuffix(".0") for factor in (self.before, self.after))
        factors = "" if before == after == "1" else f", factors {before} and {after}"
        return f"{self.op}{factors}{', half' if self.half else ''}"


@dataclass(frozen=True)
class CollectiveCall(Call):
    """One collective on an array."""

    kind: str  # what is done
    dtype: str  # its name
    shape: tuple[int | None, ...]  # of the array; None where ranks may differ
    how: Reduction | None = None  # of a reduction
    root: int | None = None  # of a broadcast: the number in the job
    name: str | None = None  # given by the caller, for messages; ranks that give different ones are told

    def __str__(self) -> str:
        """Local: as a signature."""
        how = "" if self.how is None else f"({self.how})"
        root = "" if self.root is None else f" from rank {self.root}"
        shape = ", ".join("*" if length is None else str(length) for length in self.shape)
        return f"{self.kind}{how}{root} of {self.dtype}[{shape}]" + (f" named {self.name!r}" if self.name else "")


@functools.lru_cache(maxsize=1024)  # the name of a dtype alone takes numpy 10 us
def call_of(
    kind: str,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    name: str | None,
    how: Reduction | None = None,
    root: int | None = None,
) -> CollectiveCall:
    """Local: what ranks agree on."""
    return CollectiveCall(kind, dtype.name, shape, how, root, name)


@_in_turn
def all_reduce(world: World, array: Buffer, how: Reduction, name: str | None = None, gathered: bool = False) -> Buffer:
    """Collective: the reduction over ranks, of equal shapes; with `gathered` their headers are there."""
    call = call_of("all_reduce", array.dtype, array.shape, name, how)
    world.agreement.call(call, idle_ok=how.op != "adasum", gathered=gathered)
    return _reduced(world, array, how)


def _reduced(world: World, array: Buffer, how: Reduction) -> Buffer:
    """Collective: the reduction itself."""
    # A copy: what TensorFlow hands over is the tensor's own memory, which other operations may still read.
    result = np.array(array, order="C", ndmin=1).reshape(-1)
    if how.before != 1.0:
        result = _scaled(result, how.before)
    after = how.after
    if result.dtype.kind == "b":
        result = _reduce_bool(world, result, how.op)
    elif how.op in ("sum", "mean"):
        result = _added(world, result, how)
        after = 1.0 if how.op == "mean" else after
    elif how.op == "adasum":
        adasum.all_reduce(world.communicator, result)
    else:
        world.communicator.all_reduce(result, how.op)  # type: ignore[arg-type]
    return (result if after == 1.0 else _scaled(result, after)).reshape(array.shape)


def _added(world: World, array: Buffer, how: Reduction) -> Buffer:
    """Collective: the sum, or the mean times its factor."""
    op, after = how.op, how.after
    as_it_is = how.half and array.dtype.itemsize == 2 and array.dtype.kind not in "iu"
    wide = array if as_it_is else array.astype(_wide(array.dtype, op), copy=False)
    if wide.dtype.kind not in "iu":
        world.all_reduce.sum(wide, wide, after / world.size if op == "mean" else 1.0)
        return wide.astype(array.dtype, copy=False)
    world.all_reduce.sum(wide, wide)
    if op == "mean" and after != 1.0:
        wide = np.trunc(wide.astype(np.float64) * after / world.size)
    elif op == "mean":
        # Towards zero, where `//` rounds down; and not by floats, which do not hold large integers.
        wide = np.where(wide < 0, -(-wide // world.size), wide // world.size)
    return wide.astype(array.dtype, copy=False)


def _scaled(array: Buffer, factor: float) -> Buffer:
    if array.dtype.kind in "iub":
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    result = array.copy()
    scale(result, factor)
    return result


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


@_in_turn
def all_gather(world: World, array: Buffer, name: str | None = None) -> Buffer:
    """Collective: concatenation along the first axis, in rank order; first dimensions may differ."""
    array = np.atleast_1d(array)
    world.agreement.call(call_of("all_gather", array.dtype, (None, *array.shape[1:]), name), idle_ok=True)
    return _gathered(world, array)


def _gathered(world: World, array: Buffer) -> Buffer:
    """Collective: the concatenation itself."""
    # MPI_Allgatherv has to be told all of them on each rank.
    counts = _gather_counts(world, [array.shape[0]])[:, 0]
    row = int(np.prod(array.shape[1:], dtype=np.int64))
    result = np.empty((int(counts.sum()), *array.shape[1:]), array.dtype)
    world.communicator.all_gather_v(_contiguous(array), result, [int(count) * row for count in counts])
    return result


def without_data(world: World, call: Call) -> Callable[[], object] | None:
    """Local: how a rank without data takes part in a collective that others agreed on; None if it cannot."""
    if call == SESSION_ROUND:
        return lambda: world.communicator.all_gather_obj((None, 0.0))
    if not isinstance(call, CollectiveCall):
        return None
    rows = np.zeros([length or 0 for length in call.shape], call.dtype)
    if call.kind == "all_reduce" and call.how is not None and call.how.op != "adasum":
        if call.how.op in NEUTRAL:
            rows[...] = NEUTRAL[call.how.op](rows.dtype)
        how = replace(call.how, before=1.0)  # it has nothing to multiply
        return lambda: _reduced(world, rows, how)
    return (lambda: _gathered(world, rows)) if call.kind == "all_gather" else None


@_in_turn
def broadcast(world: World, array: Buffer, root: int, name: str | None = None) -> Buffer:
    """Collective: rank `root`'s array."""
    world.agreement.call(call_of("broadcast", array.dtype, array.shape, name, root=world.agreement.number(root)))
    result = np.array(array, order="C", ndmin=1)
    world.communicator.broadcast(result, root)
    return result.reshape(array.shape)


@_in_turn
def reduce_scatter(world: World, array: Buffer, how: Reduction, name: str | None = None) -> Buffer:
    """Collective: this rank's rows of the reduction; earlier ranks get one row more."""
    world.agreement.call(call_of("reduce_scatter", array.dtype, array.shape, name, how))
    total = _reduced(world, array, how)
    base, extra = divmod(array.shape[0], world.size)
    start = world.rank * base + min(world.rank, extra)
    return total[start : start + base + (world.rank < extra)]


@_in_turn
def all_to_all(world: World, array: Buffer, splits: Buffer | None, name: str | None = None) -> tuple[Buffer, Buffer]:
    """Collective: send runs of rows to each rank; the rows received, and how many from each rank."""
    rows = array.shape[0] if array.ndim else 0
    if splits is None:
        splits = np.full(world.size, rows // world.size)
    # One whose numbers are wrong takes part all the same, and tells all by -1, which is no number of rows.
    valid = splits.shape == (world.size,) and bool((splits >= 0).all()) and int(splits.sum()) == rows
    world.agreement.call(call_of("all_to_all", array.dtype, (None, *array.shape[1:]), name))
    counts = _gather_counts(world, splits if valid else np.full(world.size, -1))
    bad = [world.agreement.number(rank) for rank in range(world.size) if (counts[rank] < 0).any()]
    if bad:
        own = f"; this rank gave {splits.tolist()} for {counted(rows, 'row')}" if not valid else ""
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


def _gather_counts(world: World, counts: Buffer | list[int]) -> Buffer:
    own = np.asarray(counts, np.int64)
    result = np.zeros((world.size, len(own)), np.int64)
    world.communicator.all_gather(own, result)
    return result
