"""The contract of communicators, without MPI; `tests/spmd/test_contracts.py` has that of MPI."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalCommunicator
from tests import simulated
from tests.contracts.communicator import each_check

Check = Callable[[Communicator], None]


@each_check
def test_local(check: Check) -> None:
    check(LocalCommunicator())


def test_one_rank_has_nobody_to_send_to() -> None:
    communicator = LocalCommunicator()
    for start in (communicator.isend, communicator.irecv):
        with pytest.raises(ValueError, match="one rank"):
            start(np.zeros(1), 0)


@each_check
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_simulated(check: Check, size: int) -> None:
    simulated.run(size, check)
