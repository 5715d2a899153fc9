"""Which server hosts which rows of which variable. Pure: no communication, no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpitrain.reduction.buckets import BucketPlan, TensorSpec, itemsize
from mpitrain.runtime.counted import counted

MIB = 1 << 20


@dataclass(frozen=True)
class Shard:
    """Rows of one variable on one server."""

    variable: int  # its position
    begin: int  # first row; 0 for a variable without axes, which has one row
    end: int  # row after the last
    server: int  # position of the server
    row_size: int  # elements of one row

    @property
    def size(self) -> int:
        """Elements."""
        return (self.end - self.begin) * self.row_size


def shard_map(
    specs: Sequence[TensorSpec],
    servers: int,
    sharding: str = "bytes",
    max_shard_bytes: int = 16 << 20,
    whole: Collection[int] = (),
) -> tuple[Shard, ...]:
    """Local: where each variable is hosted; the same for the same arguments on every rank.

    Args:
        specs: of the variables.
        servers: how many there are.
        sharding: `round-robin`: one after the other, as TensorFlow's `replica_device_setter` did; `bytes`: the
            largest first, each to the server that has least so far (Graham 1969, "longest processing time first").
        max_shard_bytes: a larger variable is split along its first axis into equal parts, where there are several
            servers.
        whole: positions of variables that are never split.

    Returns:
        Shards in the order of the variables, and within one of its rows.
    """
    pieces = [
        (position, begin, end, math.prod(spec.shape[1:]))
        for position, spec in enumerate(specs)
        for begin, end in _cut(spec, None if servers == 1 or position in whole else max_shard_bytes)
    ]
    if sharding == "round-robin":
        hosts = [index % servers for index in range(len(pieces))]
    else:
        hosts = _balanced([(end - begin) * size * itemsize(specs[p].dtype) for p, begin, end, size in pieces], servers)
    return tuple(
        Shard(position, begin, end, server, size)
        for (position, begin, end, size), server in zip(pieces, hosts, strict=True)
    )


def _cut(spec: TensorSpec, max_bytes: int | None) -> list[tuple[int, int]]:
    """Local: ranges of rows, as equal as can be."""
    rows = spec.shape[0] if spec.shape else 1
    wanted = 1 if max_bytes is None else math.ceil(spec.size * itemsize(spec.dtype) / max_bytes)
    count = max(1, min(rows, wanted))
    return [(rows * index // count, rows * (index + 1) // count) for index in range(count)]


def _balanced(sizes: Sequence[int], servers: int) -> list[int]:
    load, hosts = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        # Of equals the first: every rank makes this map for itself, and they must be the same.
        server = min(range(servers), key=lambda one: (load[one], one))
        hosts[index] = server
        load[server] += sizes[index]
    return hosts


@dataclass(frozen=True)
class Piece:
    """One shard within a message."""

    shard: Shard  # what travels
    place: int  # first element in the bucket
    offset: int  # first element in the message


@dataclass(frozen=True)
class Part:
    """What of one bucket goes to one server, and comes back from there: one message."""

    bucket: int  # its position in the plan
    server: int  # position of the server
    pieces: tuple[Piece, ...]  # in the order in which they are packed
    size: int  # elements
    dtype: str  # as it travels
    sparse: bool  # rows of the one piece travel with their numbers


def parts_of(plan: BucketPlan, shards: Sequence[Shard]) -> tuple[Part, ...]:
    """Local: the messages of one update, in the order of the buckets, and within one of the servers."""
    found = []
    for index, bucket in enumerate(plan.buckets):
        places = dict(zip(bucket.members, bucket.offsets, strict=True))
        own = [shard for member in bucket.members for shard in shards if shard.variable == member]
        for server in sorted({shard.server for shard in own}):
            pieces, offset = [], 0
            for shard in own:
                if shard.server == server:
                    pieces.append(Piece(shard, places[shard.variable] + shard.begin * shard.row_size, offset))
                    offset += 0 if bucket.sparse else shard.size
            # Rows name the shard they belong to by where they are, so each shard has a message of its own.
            groups = [(piece,) for piece in pieces] if bucket.sparse else [tuple(pieces)]
            sizes = [sum(piece.shard.size for piece in group) for group in groups]
            found += [
                Part(index, server, group, size, bucket.dtype, bucket.sparse)
                for group, size in zip(groups, sizes, strict=True)
            ]
    return tuple(found)


def table(specs: Sequence[TensorSpec], shards: Sequence[Shard], servers: Sequence[int]) -> str:
    """Local: the map as text, one line a server, with its rank, bytes and variables."""
    lines = []
    for position, rank in enumerate(servers):
        own = [shard for shard in shards if shard.server == position]
        nbytes = sum(shard.size * itemsize(specs[shard.variable].dtype) for shard in own)
        names = ", ".join(_name(specs[shard.variable], shard) for shard in own)
        lines.append(
            f"server rank {rank}: {nbytes / MIB:.2f} MiB in {counted(len(own), 'shard')}: {names or 'nothing'}"
        )
    return "\n".join(lines)


def _name(spec: TensorSpec, shard: Shard) -> str:
    rows = spec.shape[0] if spec.shape else 1
    return spec.name if shard.end - shard.begin == rows else f"{spec.name}[{shard.begin}:{shard.end}]"
