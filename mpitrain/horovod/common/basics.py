"""The job and its process sets as one object, which Horovod's modules call `_basics`."""

from __future__ import annotations

from typing import Any

from mpitrain.horovod import basics
from mpitrain.horovod.process_sets import table


class HorovodBasics:
    """Every function of `mpitrain.horovod.basics`, and what tests ask about process sets."""

    def __init__(self, *ignored: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(basics, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return table.ids_and_ranks()

    def _process_set_size(self, process_set_id: int) -> int:
        return len(table.ranks_of(process_set_id))

    def _process_set_rank(self, process_set_id: int) -> int:
        member = table.member(process_set_id)
        if member is None:
            raise ValueError(f"rank {basics.rank()} is not part of process set {process_set_id}")
        return member.rank
