"""The object that Horovod's modules call `_basics`."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.horovod import basics, process_sets
from mpitrain.horovod.common import basics as common
from mpitrain.horovod.common.basics import HorovodBasics
from mpitrain.world.world import World
from tests.unit.horovod.job import TableOfThread, run


@pytest.fixture(autouse=True)
def _table_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "table", process_sets.table)
    assert isinstance(process_sets.table, TableOfThread)


def test_it_has_all_functions_and_tells_of_process_sets() -> None:
    def rank(world: World) -> Any:
        found = HorovodBasics("horovod.tensorflow", "mpi_lib")
        number = process_sets.table.add([1, 2])
        assert found.rank is basics.rank
        place: Any
        try:
            place = found._process_set_rank(number)
        except ValueError as error:
            place = str(error)
        return found._get_process_set_ids_and_ranks(), found._process_set_size(number), place

    every = {0: [0, 1, 2], 1: [1, 2]}
    assert [told[:2] for told in run(3, rank)] == [(every, 2)] * 3
    assert [told[2] for told in run(3, rank)] == ["rank 0 is not part of process set 1", 0, 1]
