"""Which server gets which variable, and the table of operations."""

from __future__ import annotations

import random

import pytest

from mpitrain.placement import Row, Table, spread
from mpitrain.placement.spreading import By
from mpitrain.placement.table import short


@pytest.mark.parametrize(
    ("sizes", "servers", "by", "expected"),
    [
        ([10, 1, 1, 1, 9], 2, "round_robin", [0, 1, 0, 1, 0]),
        ([10, 1, 1, 1, 9], 2, "bytes", [0, 1, 1, 1, 1]),
        ([4, 4, 4, 4], 2, "bytes", [0, 1, 0, 1]),
        ([0, 0, 0], 3, "bytes", [0, 1, 2]),
        ([5, 3, 2, 6], 3, "bytes", [0, 1, 2, 2]),
        ([5, 3], 1, "bytes", [0, 0]),
        ([], 2, "bytes", []),
    ],
)
def test_spread(sizes: list[int], servers: int, by: By, expected: list[int]) -> None:
    assert spread(sizes, servers, by) == expected


def test_no_server_holds_much_more_than_it_must() -> None:
    for seed in range(20):
        sizes = [random.Random(seed * 100 + index).randrange(1, 1000) for index in range(30)]
        for servers in (2, 3, 5):
            chosen = spread(sizes, servers)
            held = [sum(size for size, one in zip(sizes, chosen, strict=True) if one == s) for s in range(servers)]
            must = max(*sizes, sum(sizes) / servers)
            assert max(held) <= (2 - 1 / servers) * must


@pytest.mark.parametrize(("servers", "by"), [(0, "bytes"), (2, "size")])
def test_bad_rules(servers: int, by: By) -> None:
    with pytest.raises(ValueError, match="expected one or more, by bytes or round_robin"):
        spread([1], servers, by)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("/job:worker/replica:0/task:1/device:CPU:0", "/job:worker/task:1/CPU:0"),
        ("/job:localhost/replica:0/task:0/device:GPU:1", "/GPU:1"),
        ("/device:GPU:0", "/GPU:0"),
        ("/job:ps", "/job:ps"),
        ("", ""),
    ],
)
def test_short_names(device: str, expected: str) -> None:
    assert short(device) == expected


def test_the_table() -> None:
    table = Table()
    table.add(Row("layer/MatMul", "MatMul", "/job:worker/task:1", "/job:worker/replica:0/task:1/device:CPU:0"))
    table.add(Row("w", "VarHandleOp", "", "/job:ps/replica:0/task:0/device:CPU:0"))
    table.add(Row("w", "VarHandleOp", "", "/job:ps/replica:0/task:0/device:CPU:0"))
    assert str(table).splitlines() == [
        "operation     kind         requested           actual",
        "layer/MatMul  MatMul       /job:worker/task:1  /job:worker/task:1/CPU:0",
        "w             VarHandleOp  any                 /job:ps/task:0/CPU:0",
    ]
    assert table.actual("MatMul") == table.actual("layer/MatMul") == ["/job:worker/task:1/CPU:0"]
    assert table.actual("Mul") == []
    assert table.counts() == {"/job:worker/task:1/CPU:0": 1, "/job:ps/task:0/CPU:0": 1}
    assert len(list(table)) == 2
