"""Collectives on arrays: ranks without data take part in those of the others with nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.collectives import host
from mpitrain.collectives.host import SESSION_ROUND, CollectiveCall, Reduction, without_data
from mpitrain.world.world import World
from tests.unit.job import run

OWN = np.array([3, -4], np.int32)


@pytest.mark.parametrize(
    ("how", "dtype", "expected"),
    [
        (Reduction("sum"), "int32", [3, -4]),
        (Reduction("sum", before=2.0), "int32", [6, -8]),
        (Reduction("mean"), "float64", [1.5, -2.0]),
        (Reduction("min"), "int32", [3, -4]),
        (Reduction("max"), "float32", [3, -4]),
        (Reduction("product"), "int64", [3, -4]),
        (Reduction("max"), "bool", [True, True]),
        (Reduction("min"), "bool", [True, True]),
    ],
    ids=str,
)
def test_a_rank_without_data_changes_nothing(how: Reduction, dtype: str, expected: list[Any]) -> None:
    def rank(world: World) -> Any:
        if world.rank == 0:
            return host._reduced(world, OWN.astype(dtype), how).tolist()
        take_part = without_data(world, CollectiveCall("all_reduce", dtype, (2,), how))
        assert take_part is not None
        take_part()
        return None

    assert run(2, rank) == [expected, None]


def test_a_rank_without_data_gives_no_rows() -> None:
    def rank(world: World) -> Any:
        if world.rank == 0:
            return host._gathered(world, np.ones((2, 3), np.float32)).shape
        take_part = without_data(world, CollectiveCall("all_gather", "float32", (None, 3)))
        assert take_part is not None
        take_part()
        return None

    assert run(2, rank) == [(2, 3), None]


@pytest.mark.parametrize(
    "call",
    [
        CollectiveCall("broadcast", "float32", (2,), root=0),
        CollectiveCall("all_to_all", "float32", (None,)),
        CollectiveCall("reduce_scatter", "float32", (2,), Reduction("sum")),
        CollectiveCall("all_reduce", "float32", (2,), Reduction("adasum")),
    ],
    ids=str,
)
def test_what_needs_all_ranks(call: CollectiveCall) -> None:
    def rank(world: World) -> None:
        assert without_data(world, call) is None
        assert without_data(world, SESSION_ROUND) is not None

    run(1, rank)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            CollectiveCall("all_reduce", "float32", (2, 3), Reduction("sum", 0.5, 2.0, True)),
            "all_reduce(sum, factors 0.5 and 2, half) of float32[2, 3]",
        ),
        (CollectiveCall("all_gather", "int8", (None, 4), name="n"), "all_gather of int8[*, 4] named 'n'"),
        (CollectiveCall("broadcast", "bool", (), root=3), "broadcast from rank 3 of bool[]"),
    ],
)
def test_calls_are_shown_as_signatures(call: CollectiveCall, text: str) -> None:
    assert str(call) == text
