"""Who has started this process, and whom it meets."""

from __future__ import annotations

import os
import sys
import types

import pytest

from mpitrain.comm.local import LocalCommunicator
from mpitrain.world import connection

RANK = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_without_a_launcher_a_rank_is_alone_and_mpi_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    communicator, topology = connection.connect({})
    assert isinstance(communicator, LocalCommunicator)
    assert (topology.size, topology.hosts) == (1, (os.uname().nodename,))
    assert "mpi4py.MPI" not in sys.modules


def test_a_rank_knows_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    found = connection.launcher_of(RANK)
    assert found is not None
    assert (found.rank, found.size) == (1, 2)
    assert connection.launcher_of({}) is None


def test_workers_of_multiprocessing_inherit_variables_and_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = types.SimpleNamespace(parent_process=object)
    with monkeypatch.context() as forked:
        forked.setitem(sys.modules, "multiprocessing.process", worker)
        assert connection.launcher_of(RANK) is None
    spawned = types.ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", spawned)
    assert connection.launcher_of(RANK) is None
