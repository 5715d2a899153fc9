"""Whether the ranks are the same program."""

from __future__ import annotations

from mpitrain.faults import comparison as alike

BASE = {"Python": "3.11", "arguments": "--epochs 3", "code of train": "aa"}


def test_ranks_that_are_alike_have_no_table() -> None:
    assert alike.differences([BASE, dict(BASE)], ["a", "b"]) is None


def test_table_of_differences() -> None:
    table = alike.differences(
        [BASE, BASE, {**BASE, "arguments": "--epochs 4", "keras": "3.9"}, {**BASE, "Python": "3.12"}],
        ["a", "a", "b", "c"],
    )
    assert table is not None
    lines = [line.split() for line in table.splitlines()]
    assert lines[1] == ["ranks", "0,", "1", "(a)", "rank", "2", "(b)", "rank", "3", "(c)"]
    assert lines[2:] == [
        ["Python", "3.11", "3.11", "3.12"],
        ["arguments", "--epochs", "3", "--epochs", "4", "--epochs", "3"],
        ["keras", "-", "3.9", "-"],
    ]


def test_long_values_are_shown_from_their_difference_on() -> None:
    one, two = "x" * 300 + "first" + "y" * 300, "x" * 300 + "other" + "y" * 300
    table = alike.differences([{"arguments": one}, {"arguments": two}], ["a", "b"])
    assert table is not None
    assert "...xxxxxxxxxxfirst" in table
    assert "...xxxxxxxxxxother" in table
    assert len(table) < 400


def test_what_this_program_is() -> None:
    found = alike.program({"MPITRAIN_ALL_REDUCE": "mpi", "HOME": "/h", "MPITRAIN_FAILURE_REPORT": "f"}, "MPI 4")
    assert found["MPI"] == "MPI 4"
    assert found["variable MPITRAIN_ALL_REDUCE"] == "mpi"
    assert not any("HOME" in name or "FAILURE_REPORT" in name for name in found)
    assert f"code of {__name__}" in found, "modules of the user"
    assert not any(name.startswith(("code of pytest", "code of json", "code of mpitrain.")) for name in found)
    assert found == alike.program({"MPITRAIN_ALL_REDUCE": "mpi", "KERAS_BACKEND": "tensorflow"}, "MPI 4")
