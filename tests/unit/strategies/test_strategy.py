"""The contract of strategies, on ranks that are threads."""

from __future__ import annotations

import pytest

from mpitrain.strategies.local import Local
from mpitrain.strategies.strategy import strategy_of
from tests.contracts.engine import WAYS
from tests.contracts.strategy import JOBS, OUT_OF_STEP, Check, each_check
from tests.unit.job import run


@each_check
@pytest.mark.parametrize("name", [name for name in JOBS if name != "local"])
@pytest.mark.parametrize(("size", "way"), [(2, "graph"), (3, "eager")])
def test_several_ranks(name: str, size: int, check: Check, way: str) -> None:
    JOBS[name](size, lambda world: check(world, WAYS[way]))


@each_check
@pytest.mark.parametrize(("name", "way"), [("local", "graph"), ("parameter_server", "eager")])
def test_one_rank(name: str, check: Check, way: str) -> None:
    JOBS[name](1, lambda world: check(world, WAYS[way]))


def test_one_rank_has_the_smallest_strategy() -> None:
    (kind,) = run(1, lambda world: type(strategy_of(world)))
    assert kind is Local


@pytest.mark.parametrize("name", JOBS)
def test_who_is_in_step(name: str) -> None:
    size = 1 if name == "local" else 2
    assert JOBS[name](size, lambda world: strategy_of(world).in_step) == [name not in OUT_OF_STEP] * size
