"""What a step fetches, and its row."""

from __future__ import annotations

import pytest

from mpitrain.bench import ordering
from mpitrain.bench.ordering import Load


@pytest.mark.parametrize(
    ("work_seconds", "rate", "expected"), [(None, None, 0.1), (None, 1 << 23, 2.0), (0.5, 1 << 23, 0.5)]
)
def test_work_lasts_as_long_as_a_tensor_travels(
    work_seconds: float | None, rate: float | None, expected: float
) -> None:
    assert Load.of(2.0, 8, work_seconds, rate) == Load(2.0, 8, expected, rate)


def test_the_row_of_a_window() -> None:
    at_once = ordering._Case([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0])
    case = ordering._Case([0.5, 0.1, 0.5], [2.0, 2.0, 9.0], [3.0, 3.0, 7.0])
    row = ordering._row(Load(2.0, 8, 0.25, 1 << 24), 1, case, at_once)
    assert row.case == {"MiB": "2", "tensors": 8, "at a time": "1"}
    assert row.figures == {
        "first needed there s": 0.5,
        "all there s": 2.0,
        "step s": 3.0,
        "step / at once": 0.75,
        "limit s": 8.25,  # all travel, and the work with the last
    }
    assert row.raw["last_seconds"] == (2.0, 2.0, 9.0)
    without = ordering._row(Load(2.0, 8, 0.25), 8, case, at_once)
    assert (without.case["at a time"], "limit s" in without.figures) == ("all", False)
