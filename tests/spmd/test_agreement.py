"""The ranks agree on verdicts (failures are in tests/launch/test_spmd_verdicts.py: they end the job)."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpich, pytest.mark.ranks(1, 2, 3, 4)]


def test_all_ranks_are_in_one_world() -> None:
    ranks = WORLD.allgather(WORLD.Get_rank())
    assert ranks == list(range(WORLD.Get_size()))


def test_ranks_run_the_same_test(request: pytest.FixtureRequest) -> None:
    names = WORLD.allgather(request.node.nodeid)
    assert len(set(names)) == 1


def test_only_rank_0_reports(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.hasplugin("terminalreporter") == (WORLD.Get_rank() == 0)


def test_shared_path_is_one_and_tmp_path_is_not(shared_path: Path, tmp_path: Path) -> None:
    assert len(set(WORLD.allgather(str(shared_path)))) == 1
    assert len(set(WORLD.allgather(str(tmp_path)))) == WORLD.Get_size()
    (shared_path / str(WORLD.Get_rank())).touch()
    WORLD.Barrier()
    assert len(list(shared_path.iterdir())) == WORLD.Get_size()


@pytest.mark.xfail(reason="fails alike on all ranks", strict=True)
def test_expected_failures_are_agreed_too() -> None:
    assert WORLD.Get_size() == 0
