"""Which server hosts what: every row once, evenly, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.reduction.buckets import TensorSpec, plan_buckets
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import Roles, roles
from mpitrain.strategies.parameter_server.shards import Shard, parts_of, shard_map, table

SPECS = [
    TensorSpec("a/kernel", (100, 10), "float32"),
    TensorSpec("a/bias", (10,), "float32"),
    TensorSpec("b/kernel", (10, 3), "float32"),
    TensorSpec("scale", (), "float32"),
]


def test_round_robin() -> None:
    shards = shard_map(SPECS, 2, "round-robin")
    assert [(shard.variable, shard.server) for shard in shards] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_large_variables_are_split_along_the_first_axis() -> None:
    shards = shard_map(SPECS, 2, "bytes", max_shard_bytes=1000)
    assert [(s.begin, s.end, s.row_size) for s in shards if s.variable == 0] == [
        *((0, 25, 10), (25, 50, 10), (50, 75, 10), (75, 100, 10))
    ]
    assert [(s.begin, s.end, s.row_size) for s in shards if s.variable == 3] == [(0, 1, 1)]
    load = [sum(s.size for s in shards if s.server == server) for server in (0, 1)]
    assert load == [530, 511]


def test_one_server_has_all_in_one_piece_and_whole_variables_stay_whole() -> None:
    assert len(shard_map(SPECS, 1, "bytes", max_shard_bytes=1)) == len(SPECS)
    assert len(shard_map(SPECS, 3, "bytes", max_shard_bytes=1, whole=range(4))) == len(SPECS)


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 4), st.sampled_from(["bytes", "round-robin"]), st.integers(1, 200), st.data())
def test_every_element_travels_once(
    shapes: list[tuple[int, ...]], servers: int, sharding: str, max_bytes: int, data: st.DataObject
) -> None:
    sparse = [len(shape) > 0 and data.draw(st.booleans()) for shape in shapes]
    specs = [TensorSpec(f"v{i}", shape, "float32", sparse[i]) for i, shape in enumerate(shapes)]
    shards = shard_map(specs, servers, sharding, max_bytes)
    plan = plan_buckets(specs, alone_bytes=64)
    parts = parts_of(plan, shards)
    assert [part.bucket for part in parts] == sorted(part.bucket for part in parts)
    seen = [np.zeros(bucket.size, int) for bucket in plan.buckets]
    for part in parts:
        offset = 0
        for piece in part.pieces:
            assert piece.shard.server == part.server
            assert piece.offset == offset
            seen[part.bucket][piece.place : piece.place + piece.shard.size] += 1
            offset += piece.shard.size
        assert part.size == offset
        assert not part.sparse or len(part.pieces) == 1
    for bucket, counts in zip(plan.buckets, seen, strict=True):
        for member, place in zip(bucket.members, bucket.offsets, strict=True):
            assert (counts[place : place + specs[member].size] == 1).all()
        assert counts.sum() == sum(specs[member].size for member in bucket.members)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 5))
def test_bytes_are_balanced(sizes: list[int], servers: int) -> None:
    specs = [TensorSpec(f"v{i}", (size,), "float32") for i, size in enumerate(sizes)]
    shards = shard_map(specs, servers, "bytes", max_shard_bytes=1 << 30)
    load = [sum(s.size for s in shards if s.server == server) for server in range(servers)]
    # Graham's bound: within 4/3 of the best, which is at least the mean and the largest.
    best = max(sum(sizes) / servers, *sizes)
    assert max(load) <= 4 / 3 * best + max(sizes) / 3


def test_the_map_as_text() -> None:
    shards = (Shard(0, 0, 50, 0, 10), Shard(0, 50, 100, 1, 10), Shard(3, 0, 1, 1, 1))
    assert table(SPECS, shards, (0, 1)).splitlines() == [
        "server rank 0: 0.00 MiB in 1 shard: a/kernel[0:50]",
        "server rank 1: 0.00 MiB in 2 shards: a/kernel[50:100], scale",
    ]


def test_roles() -> None:
    assert roles("2", 5) == Roles((0, 1), (2, 3, 4))
    assert roles("colocated", 3) == Roles((0,), (0, 1, 2))
    assert roles("2", 5).serving_only == (0, 1)
    assert roles("colocated", 3).serving_only == ()
    for servers, ranks, text in (("1", 1, "no worker"), ("3", 3, "no worker"), ("0", 2, "number"), ("x", 2, "number")):
        with pytest.raises(UsageError, match=text):
            roles(servers, ranks)
    with pytest.raises(UsageError, match="two ranks"):
        roles("colocated", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ServerOptions(mode="both"), "sync, async"),
        (ServerOptions(backup_workers=3), "no gradient"),
        (ServerOptions(mode="async", backup_workers=1), "--mode sync"),
        (ServerOptions(max_staleness=1), "--mode async"),
        (ServerOptions(warmup_steps=1), "--mode async"),
        (ServerOptions(stale="drop"), "--mode async"),
        (ServerOptions(mode="async", max_staleness=-1), "at least 0"),
    ],
)
def test_options_that_do_not_go_together(options: ServerOptions, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        options.check(3)


def test_options_that_go_together() -> None:
    ServerOptions(backup_workers=2).check(3)
    ServerOptions(mode="async", max_staleness=0, stale="scale", warmup_steps=5).check(1)
