"""The contract of engines, without MPI; tests/spmd/test_contracts.py has that of MPI."""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf

from mpitrain.collectives.registry import ENGINES, engine_of
from mpitrain.errors import AgreedError
from mpitrain.world.world import World
from tests.contracts.engine import (
    WAYS,
    Check,
    Way,
    check_dense_average,
    check_factors,
    check_rows,
    each_check,
    each_way,
)
from tests.unit.job import run

HERE = [name for name in ENGINES if name != "native"]  # which wants MPI


@each_way
@each_check
@pytest.mark.parametrize("name", HERE)
def test_one_rank(name: str, check: Check, way: Way) -> None:
    run(1, lambda world: check(engine_of(world, name), world, way))


@each_check
@pytest.mark.parametrize(("size", "way"), [(2, "graph"), (3, "eager")])
def test_several_ranks(check: Check, size: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_ALL_REDUCE", "ring:65536:4")
    run(size, lambda world: check(engine_of(world), world, WAYS[way]))


@pytest.mark.parametrize("check", [check_factors, check_rows, check_dense_average])
@pytest.mark.parametrize("name", HERE)
def test_xla(name: str, check: Check) -> None:
    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)

    def rank(world: World) -> None:
        engine = engine_of(world, name)
        if engine.capabilities.not_in_xla is None:
            check(engine, world, compiled)
        else:
            with pytest.raises(AgreedError, match="has jit_compile=True"):
                check(engine, world, compiled)

    run(1, rank)


def test_the_engine_for_one_rank_is_for_one_rank() -> None:
    def rank(world: World) -> None:
        with pytest.raises(ValueError, match="for one rank, not 2"):
            engine_of(world, "one_rank")

    run(2, rank)
