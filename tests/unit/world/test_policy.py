"""Which strategy a World has where none is chosen."""

from __future__ import annotations

from mpitrain.strategies.all_reduce import AllReduce
from mpitrain.strategies.local import Local
from mpitrain.world.policy import by_size
from tests.unit.job import run


def test_one_rank_exchanges_nothing() -> None:
    (found,) = run(1, by_size)
    assert isinstance(found, Local)
    assert not found.exchanges


def test_several_average() -> None:
    for found in run(2, by_size):
        assert isinstance(found, AllReduce)
        assert found.exchanges
