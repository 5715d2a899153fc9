"""Jobs that a benchmark starts itself."""

from __future__ import annotations

import pytest

from mpitrain.bench.processes import Mpirun
from mpitrain.errors import UsageError


def test_own_jobs_are_refused_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UsageError, match="run it without mpirun"):
        Mpirun.find("mpirun")
