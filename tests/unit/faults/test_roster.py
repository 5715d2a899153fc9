"""Which ranks may be the one that all others report to."""

from __future__ import annotations

import pytest

from mpitrain.faults.processes import Process
from mpitrain.faults.roster import Roster, Seat


def roster(nodes: list[int], own: int) -> Roster:
    seats = tuple(Seat(rank, f"h{node}", node, Process(1, 1), ()) for rank, node in enumerate(nodes))
    return Roster(own, seats, "t")


@pytest.mark.parametrize(
    ("nodes", "own", "candidates"),
    [
        ([0, 0, 0], 0, [0]),
        ([0, 0, 0], 2, [0, 1, 2]),
        ([0] * 8 + [1] * 8, 12, [0, 1, 2, 3, 8, 12]),
        ([0, 1, 2, 3], 3, [0, 1, 2, 3]),
    ],
)
def test_who_may_be_the_hub(nodes: list[int], own: int, candidates: list[int]) -> None:
    assert roster(nodes, own).candidates() == candidates


@pytest.mark.parametrize(
    ("own", "lost", "candidates"),
    [
        (0, [1], [0]),
        (1, [0], [1]),
        (5, [0], [1, 2, 3, 4, 5]),
        (2, [0, 1, 3, 4, 5], [2]),
        (5, [0, 1, 2, 3], [4, 5]),
        (4, [0, 1, 2, 3], [4]),
    ],
)
def test_who_takes_the_places_of_ranks_that_are_lost(own: int, lost: list[int], candidates: list[int]) -> None:
    assert roster([0] * 6, own).candidates(lost) == candidates
