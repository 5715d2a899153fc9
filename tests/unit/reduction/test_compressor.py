"""The contract of compressors, without MPI; tests/spmd/test_contracts.py has them with MPI."""

from __future__ import annotations

import pytest

from mpitrain.collectives.registry import engine_of
from tests.contracts.compressor import Check, each_check, each_compressor
from tests.unit.job import run


@each_check
@each_compressor
@pytest.mark.parametrize(("engine", "size"), [("one_rank", 1), ("host", 1), ("host", 2)])
def test_compressors(check: Check, name: str, engine: str, size: int) -> None:
    run(size, lambda world: check(name, engine_of(world, engine), world))
