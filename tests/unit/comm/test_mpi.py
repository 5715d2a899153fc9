"""What is made of calls before they come to MPI; tests/spmd/test_contracts.py has MPI itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mpitrain.comm.mpi import MpiCommunicator, entered
from mpitrain.errors import RankLostError
from mpitrain.faults.activity import Activity


class MpiError(Exception):
    """As of MPI."""


class Communicator:
    """As far as `entered` and the methods below look at one."""

    failure = MpiError
    largest_bytes = 16
    _pieces = MpiCommunicator._pieces

    def __init__(self) -> None:
        self.activity = Activity()
        self.inside: list[str | None] = []

    def explained(self, error: Exception) -> Exception:
        return RankLostError(str(error))

    def barrier(self, fails: bool = False, nested: bool = False) -> str:
        self.inside.append(self.activity.inside)
        if fails:
            raise MpiError("lost")
        return f"done, {cast(Any, entered(Communicator.barrier))(self)}" if nested else "done"


ENTERED: Any = entered(Communicator.barrier)


def test_the_watchdog_is_told_of_a_collective_while_it_lasts() -> None:
    communicator = Communicator()
    before = communicator.activity.position
    assert ENTERED(communicator, False, True) == "done, done"
    communicator.activity.inside = "bucket 1"  # told by somebody above, who knows better
    ENTERED(communicator)
    assert communicator.inside == ["barrier", "barrier", "bucket 1"]
    assert communicator.activity.inside == "bucket 1"
    assert communicator.activity.position == before + 3


def test_an_error_of_mpi_is_explained_and_the_collective_is_left() -> None:
    communicator = Communicator()
    with pytest.raises(RankLostError, match="lost"):
        ENTERED(communicator, True)
    assert communicator.activity.inside is None


def test_what_is_too_large_for_one_call_is_cut() -> None:
    communicator: Any = Communicator()
    small, large = np.arange(4, dtype=np.float32), np.arange(11, dtype=np.float32)
    assert [piece.size for piece in communicator._pieces(small)] == [4]
    pieces = communicator._pieces(large)
    assert [piece.size for piece in pieces] == [4, 4, 3]
    assert np.array_equal(np.concatenate(pieces), large)
    pieces[1][:] = 0  # views, into which MPI receives
    assert large[4:8].tolist() == [0.0] * 4
    wide = np.zeros(2, "V32")
    assert [piece.size for piece in communicator._pieces(wide)] == [1, 1]


def test_only_the_loss_of_a_rank_is_told_as_one() -> None:
    mpi = SimpleNamespace(ERR_PROC_FAILED=1, ERR_PROC_FAILED_PENDING=2, ERR_REVOKED=3)
    revoked: list[str] = []

    def communicator(can_shrink: bool) -> Any:
        made: Any = MpiCommunicator.__new__(MpiCommunicator)
        made._mpi, made._can_shrink, made._comm, made.lost_seconds = mpi, can_shrink, "present", None
        made.activity, made.failure = Activity(), MpiError
        made.revoke = lambda: revoked.append("own")
        made.tied = [SimpleNamespace(revoke=lambda: revoked.append("tied"))]
        return made

    def error(kind: int) -> Any:
        made: Any = MpiError()
        made.Get_error_class = lambda: kind
        return made

    other, lost = error(7), error(3)
    assert communicator(True).explained(other) is other
    assert communicator(False).explained(lost) is lost
    old = communicator(True)
    assert isinstance(old.explained(lost, "left behind"), RankLostError)
    assert (revoked, old.lost_seconds) == ([], None)
    made = communicator(True)
    told = made.explained(lost)
    assert (revoked, made.activity.error) == (["own", "tied"], told)
    assert made.lost_seconds > 0
