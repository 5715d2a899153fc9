"""The table of what is different from a run under plain Python."""

from __future__ import annotations

from mpitrain.scripts.changes import Changes


def test_rows_are_by_part_and_each_is_there_once() -> None:
    changes = Changes()
    assert str(changes) == "nothing is changed"
    for part, text in (("files", "b"), ("data", "a"), ("files", "b"), ("files", "a")):
        changes.note(part, text)
    assert [line.split() for line in str(changes).splitlines()] == [["data", "a"], ["files", "b"], ["files", "a"]]
