"""Who waits for whom, and what is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.faults import stalls
from mpitrain.faults.stalls import RankState

INSIDE: dict[str, Any] = {"heard": True, "position": 9, "waiting_seconds": 40.0, "inside": "a bucket"}


BEHIND: dict[str, Any] = {"heard": True, "position": 8}


def states(*kinds: dict[str, Any]) -> list[RankState]:
    return [RankState(rank, "ab"[rank % 2], 100 + rank, **kind) for rank, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "kind", "late"),
    [
        ([INSIDE, INSIDE], "network", []),
        ([{**INSIDE, "waiting_seconds": 3.0}, BEHIND], "going on", []),
        ([BEHIND, BEHIND], "going on", []),
        ([INSIDE, {**BEHIND, "phase": "compute"}], "stall", [1]),
        ([INSIDE, {**BEHIND, "phase": "callback"}, {**BEHIND, "phase": "start"}], "stall", [1, 2]),
        ([{**BEHIND, "phase": "evaluation"}, INSIDE], "patient", [0]),
        ([{**BEHIND, "phase": "checkpoint"}, INSIDE, {**BEHIND, "phase": "start"}], "patient", [0, 2]),
        # One that does not answer is never excused; nor is one that waits itself, elsewhere.
        ([{**BEHIND, "phase": "evaluation", "heard": False}, INSIDE], "stall", [0]),
        ([{**BEHIND, "phase": "evaluation", "inside": "metrics", "waiting_seconds": 40.0}, INSIDE], "stall", [0]),
        ([INSIDE, {"heard": False}, INSIDE], "stall", [1]),
        # A rank that waits for the end of the program waits for whatever the others do there.
        ([{**INSIDE, "phase": "end"}, {**BEHIND, "phase": "compute"}], "patient", [1]),
        ([{**INSIDE, "phase": "end"}, {**INSIDE, "phase": "compute"}, {**BEHIND, "phase": "data"}], "stall", [2]),
    ],
)
def test_verdicts(kinds: list[dict[str, Any]], kind: str, late: list[int]) -> None:
    verdict = stalls.judge(states(*kinds), 30.0)
    assert verdict.kind == kind
    assert [state.rank for state in verdict.late] == late


def test_report_of_a_stall() -> None:
    late = {
        **BEHIND,
        "phase": "data",
        "updates": 6,
        "resident_bytes": 3 << 29,
        "stacks": (("MainThread", ("train.py:3 load",)),),
    }
    verdict = stalls.judge(states({**INSIDE, "updates": 7}, late, {"heard": False, "silence": "is silent"}), 30.0)
    assert stalls.report(verdict, 12.0).splitlines() == [
        "mpitrain: stall: 1 rank waited 40 s for rank 1 (b), rank 2 (a)",
        "  waiting    rank 0 (a) in a bucket, after update 7",
        "  not there  rank 1 (b): phase data, last update finished 6, memory 1.50 GiB",
        "    MainThread:",
        "      train.py:3 load",
        "  not there  rank 2 (a): is silent",
        "  If this lasts, the job ends in 12 s.",
    ]
