"""A fault: in words, in the record, and on its way to the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitrain.faults import report
from mpitrain.faults.activity import Activity
from mpitrain.faults.report import Culprit, Fault


def fault(rank: int, text: str) -> Fault:
    return Fault("exception", text, 1, (Culprit(rank, "ab"[rank % 2], 7),))


def test_the_same_error_on_several_ranks_is_one() -> None:
    wrapped = "Traceback\n ValueError: x\n\t [[{{node PyFunc}}]] [Op:a]\n"
    found = report.merged(
        [fault(2, "way\nValueError: x"), fault(0, "other way\nValueError: x"), fault(1, "KeyError: 1")]
    )
    assert [report.places(one.culprits) for one in found] == ["ranks 0, 2 on a", "rank 1 on b"]
    assert report.message(found[0]) == "mpitrain: ranks 0, 2 on a failed; the job ends\nway\nValueError: x\n"
    assert len(report.merged([fault(0, wrapped), fault(1, wrapped.replace("Op:a", "Op:b"))])) == 1


def test_a_fault_survives_the_way_to_the_hub_and_to_the_file(tmp_path: Path) -> None:
    one = Fault("death", "was killed", 137, (Culprit(1, "a", 7, 3, "compute", 1 << 20),), "SIGKILL", True)
    report.write(str(tmp_path / "report"), one)
    record = json.loads((tmp_path / "report").read_text())
    assert record.pop("time") > 0
    assert report.from_dict(record) == one
    report.write(str(tmp_path / "absent" / "report"), one)  # no second fault


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (fault(0, "Traceback\nValueError: x\n\t [[{{node PyFunc}}]]\n"), "ValueError: x"),
        (
            Fault("death", "was killed by SIGSEGV after update 3, with 1 GiB", 139, (), "SIGSEGV"),
            "was killed by SIGSEGV",
        ),
        (
            Fault("death", "was killed", 137, (), "SIGKILL", True),
            "was killed by SIGKILL by the kernel, which had no memory left",
        ),
        (Fault("death", "ended with exit code 4 after update 9", 4), "ended with exit code 4"),
        (Fault("stall", "stall: 2 ranks waited 30 s", 75), "did not come to where the others waited"),
        (Fault("exit", "called sys.exit(3) while others went on", 3), "called sys.exit(3) while others went on"),
        (Fault("interrupted", "", 130), "interrupted"),
    ],
)
def test_the_reason_of_a_fault_has_no_figures_of_the_moment(one: Fault, reason: str) -> None:
    assert one.reason == reason


def test_how_far_a_rank_has_come() -> None:
    activity = Activity()
    activity.updates = 7
    assert activity.progress == 7
    activity.steps = 507
    assert activity.progress == 507
