"""Which deaths are survived, and of which the ranks have been told."""

from __future__ import annotations

import pytest

from mpitrain.faults.losses import SILENT_SECONDS, TOLD_SECONDS, ShrinkRecord
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.report import Culprit, Fault


@pytest.mark.parametrize(
    ("on_failure", "status", "survived"),
    [
        ("shrink", 9, True),
        ("shrink", None, True),  # on another host
        ("shrink", 1 << 8, False),  # Open MPI ends the job
        ("abort", 9, False),
    ],
)
def test_which_deaths_are_survived(on_failure: str, status: int | None, survived: bool) -> None:
    record = ShrinkRecord(FaultOptions(on_failure=on_failure))
    record.require([0])
    assert record.is_allowed(1, status) == survived
    assert not record.is_allowed(0, status)  # it hosts parameters


def test_a_new_hub_does_not_tell_of_old_losses() -> None:
    told: list[str] = []
    said: list[dict[str, object]] = []
    death = Fault("death", "was killed by SIGKILL", 137, (Culprit(0, "hosta", 1),), "SIGKILL")
    one, other, late = (ShrinkRecord(FaultOptions(on_failure="shrink")) for _ in range(3))
    for record in (one, other, late):
        record.note([0], 10.0)
    one.tell(death, 10.0, told.append, said.append)
    assert (len(told), said) == (1, [one.answer])
    other.tell(death, 10.0 + TOLD_SECONDS / 2, told.append, said.append)  # that hub may have died before it could
    late.tell(death, 11.0 + TOLD_SECONDS, told.append, said.append)
    assert told == ["mpitrain: rank 0 on hosta was killed by SIGKILL; the others go on without it\n"] * 2
    heard = ShrinkRecord(FaultOptions(on_failure="shrink"))
    heard.note([0], 10.0)
    heard.hear(one.answer)
    heard.tell(death, 10.0, told.append, said.append)
    one.tell(death, 10.0, told.append, said.append)
    assert (len(told), len(said)) == (2, 2)


def test_a_lost_rank_whose_connection_stays_is_missed() -> None:
    record = ShrinkRecord(FaultOptions(on_failure="shrink"))
    record.note([1, 2], 10.0)
    assert record.untold(3, [0, 1], 10.0) == {}
    assert record.untold(3, [0, 1], 10.0 + SILENT_SECONDS) == {1: 10.0}
    assert record.untold(0, [0, 1], 10.0 + SILENT_SECONDS) == {1: 10.0, 2: 10.0}  # the first tells of all
    record.at_end = True
    assert record.untold(3, [0, 1], 10.0) == {1: 10.0}
    record.note([0], 11.0)
    assert record.untold(3, [], 11.0) == {1: 10.0, 2: 10.0, 0: 11.0}
