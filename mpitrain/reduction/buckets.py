"""Which gradients travel together, and in which order. Pure: no communication, no TensorFlow."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.collectives.bucket import Bucket
from mpitrain.runtime.counted import counted
from mpitrain.world.calls import Call

BUCKET_BYTES = 16 << 20
ALONE_BYTES = 1 << 20
FLAT_BYTES = 64 << 10
ALONE_BYTES_BETWEEN_HOSTS = 8 << 20
NAMED = 4  # variables of a bucket that messages name
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
HALF_PRECISIONS = ("float16", "bfloat16")


@dataclass(frozen=True)
class TensorSpec:
    """One gradient as all ranks must see it."""

    name: str  # path of the variable
    shape: tuple[int, ...]  # static shape
    dtype: str  # name of the dtype
    sparse: bool = False  # True for `tf.IndexedSlices`
    half: bool = False  # half precisions are summed as they are

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor as it travels."""
        return self.size * itemsize(self.travel_dtype)

    @property
    def travel_dtype(self) -> str:
        """The dtype in which the tensor is summed: of half precisions usually float32."""
        return "float32" if self.dtype in HALF_PRECISIONS and not (self.half and not self.sparse) else self.dtype


def alone_bytes_for(hosts: int) -> int:
    """From which size on a gradient travels alone: packing costs copies, another bucket the start of another ring.

    On one host a bucket costs some 0.3 ms and a copy 0.3 ms a MiB; between hosts a bucket costs several ms (seen
    with 1 Gbit/s: 64 MiB in 20 tensors took 1.38 times the limit of the link, in one tensor 1.09 times).
    """
    return ALONE_BYTES if hosts == 1 else ALONE_BYTES_BETWEEN_HOSTS


def itemsize(dtype: str) -> int:
    """Bytes of one element; for the dtypes gradients have."""
    return ITEM_BYTES[dtype]


@dataclass(frozen=True)
class UpdateCall(Call):
    """What all ranks know of one update before they exchange it."""

    owner: str  # whose gradients they are
    specs: tuple[TensorSpec, ...]  # of the gradients
    added_up: bool = False  # the gradients of ranks are added up, not averaged
    compiled: bool = False  # in a program of XLA with what is made of it, whose bits are not those of TensorFlow

    @functools.cached_property
    def title(self) -> str:
        """One line."""
        kinds = ", added up" * self.added_up + ", compiled" * self.compiled
        return f"{self.owner} of {counted(len(self.specs), 'gradient')}{kinds}"

    def __str__(self) -> str:
        """Local: the title, and a line for each gradient."""
        lines = [f"{s.name} {s.dtype}{[*s.shape]}{' sparse' * s.sparse}{' half' * s.half}" for s in self.specs]
        return "\n".join([self.title, *lines])


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of one update, in the order in which they are exchanged."""

    call: UpdateCall
    buckets: tuple[Bucket, ...]

    @property
    def added_up(self) -> bool:
        """The gradients of ranks are added up, not averaged."""
        return self.call.added_up

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the gradients."""
        return self.call.specs

    def describe_bucket(self, index: int) -> str:
        """One line: whose gradients, how many bytes, of which variables."""
        bucket = self.buckets[index]
        names = [self.specs[position].name for position in bucket.members]
        shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        nbytes = bucket.size * itemsize(bucket.dtype)
        return f"{self.call.title}: bucket {index + 1} of {len(self.buckets)} ({counted(nbytes, 'byte')}: {shown})"


def plan_buckets(
    specs: Sequence[TensorSpec],
    bucket_bytes: int = BUCKET_BYTES,
    alone_bytes: int = ALONE_BYTES,
    title: str = "update",
    added_up: bool = False,
    compiled: bool = False,
) -> BucketPlan:
    """Group gradients for exchange.

    The backward pass makes the gradients of the last layers first, so buckets are filled from the last gradient to the
    first. A tensor of `alone_bytes` or more is a bucket of its own: it needs no packing, and the ring cuts it into
    segments. Smaller ones are fused, one dtype a bucket, up to `bucket_bytes`. A bucket stands where its last member
    stood, because it can start no sooner. `bucket_bytes` is the most that is fused into one bucket; a tensor of
    `alone_bytes` travels alone.
    """
    finished: list[tuple[int, Bucket]] = []
    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}

    def close(dtype: str) -> None:
        members = open_members.pop(dtype)
        open_bytes.pop(dtype)
        finished.append((members[-1], _pack(specs, members, dtype)))

    for position in reversed(range(len(specs))):
        spec = specs[position]
        dtype = spec.travel_dtype
        if spec.sparse or spec.nbytes >= alone_bytes:
            finished.append((position, Bucket((position,), (0,), spec.size, dtype, spec.sparse)))
            continue
        if dtype in open_members and open_bytes[dtype] + spec.nbytes > bucket_bytes:
            close(dtype)
        open_members.setdefault(dtype, []).append(position)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + spec.nbytes
    for dtype in list(open_members):
        close(dtype)
    # As the backward pass makes them: from the last gradient to the first.
    buckets = tuple(bucket for _, bucket in sorted(finished, key=lambda entry: -entry[0]))
    return BucketPlan(UpdateCall(title, tuple(specs), added_up, compiled), buckets)


def _pack(specs: Sequence[TensorSpec], members: Sequence[int], dtype: str) -> Bucket:
    sizes = [specs[position].size for position in members]
    # TensorFlow joins them where they are small: that was faster for 200 tensors in 1 MiB, slower from 100 KiB each on.
    flat = len(sizes) > 1 and sum(sizes) * itemsize(dtype) < FLAT_BYTES * len(sizes)
    # Members of a bucket that is packed here go back to TensorFlow as views of it, which it takes without a copy only
    # where they are aligned to 64 bytes.
    step = 1 if flat else 64 // itemsize(dtype)
    ends = list(itertools.accumulate(-(-size // step) * step for size in sizes))
    offsets = [0, *ends[:-1]]
    return Bucket(tuple(members), tuple(offsets), offsets[-1] + sizes[-1], dtype, flat=flat)
