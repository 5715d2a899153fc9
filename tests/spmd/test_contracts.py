"""The contracts of `MpiCommunicator`, engines and compressors on the ranks of a job; tests/unit has those of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mpitrain
from mpitrain.collectives.registry import ENGINES, engine_of
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mpi import MpiCommunicator
from tests.contracts import communicator, compressor, engine

WORLD = mpitrain.init()
HERE = [name for name in ENGINES if name != "one_rank"]
pytestmark = [pytest.mark.mpich, pytest.mark.ranks(2, 3, 4)]


@communicator.each_check
def test_communicator(check: Callable[[Communicator], None]) -> None:
    assert isinstance(WORLD.communicator, MpiCommunicator)
    check(WORLD.communicator)


@engine.each_way
@engine.each_check
@pytest.mark.parametrize("name", HERE)
def test_engine(name: str, check: engine.Check, way: engine.Way) -> None:
    check(engine_of(WORLD, name), WORLD, way)


@compressor.each_check
@compressor.each_compressor
@pytest.mark.parametrize("engine_name", HERE)
def test_compressor(check: Any, name: str, engine_name: str) -> None:
    check(name, engine_of(WORLD, engine_name), WORLD)
