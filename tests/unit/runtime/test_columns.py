"""Rows of text in columns."""

from __future__ import annotations

from mpitrain.runtime.columns import columns


def test_cells_stand_below_each_other() -> None:
    assert columns(["rank", "host"], [["0", "a"], ["10", "host b"]]) == "rank  host\n0     a\n10    host b"
    assert columns(["none"], []) == "none"
