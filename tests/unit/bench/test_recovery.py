"""From a fault to the next step, as events and lines of a job tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mpitrain.bench import recovery
from mpitrain.bench.recovery_job import BEGUN, EVENTS, FAULT, STEP
from mpitrain.errors import MpitrainError

SHRUNK = [(BEGUN, 1.0), (STEP, 2.0), (FAULT, 10.0), (STEP, 10.1), (STEP, 11.0), (STEP, 12.0)]
RESTARTED = [(BEGUN, 1.0), (STEP, 2.0), (FAULT, 10.0), (BEGUN, 14.0), (STEP, 16.0)]


@pytest.mark.parametrize(
    ("noted", "lines", "expected"),
    [
        (SHRUNK, [(10.5, "rank 1 was killed: the others go on without it\n")], {"noticed": 0.5, "step": 1.0}),
        (
            RESTARTED,
            [(9.0, "epoch 1\n"), (12.0, "mpitrain: the job failed after 11 s\n")],
            {"noticed": 2.0, "begun": 4.0, "step": 6.0},
        ),
    ],
)
def test_seconds_since_the_fault(
    noted: Sequence[tuple[str, float]],
    lines: list[tuple[float, str]],
    expected: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job(command: Sequence[str]) -> list[tuple[float, str]]:
        directory = Path(command[-1].rpartition("Path('")[2].partition("')")[0])
        (directory / EVENTS).write_text("".join(f"{event} {moment:.6f}\n" for event, moment in noted))
        return lines

    monkeypatch.setattr(recovery, "_lines", job)
    assert recovery._times(["-np", "2"], "mlp50k", 16) == pytest.approx(expected)


def test_a_job_that_loses_no_rank_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_lines", lambda command: [(1.0, "it said so\n")])
    with pytest.raises(MpitrainError, match=r"did not lose a rank and go on.*\nit said so"):
        recovery._times([], "mlp50k", 16)
