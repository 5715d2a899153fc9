"""The contract of communicators, without MPI; `tests/spmd/test_contracts.py` has that of MPI."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpitrain.comm import simulated
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalCommunicator
from tests.contracts.communicator import each_check

Check = Callable[[Communicator], None]


@each_check
def test_local(check: Check) -> None:
    check(LocalCommunicator())


@each_check
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_simulated(check: Check, size: int) -> None:
    simulated.run(size, check)
