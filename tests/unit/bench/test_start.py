"""What the start of a job is made of."""

from __future__ import annotations

from typing import cast

import pytest

from mpitrain.bench import start
from mpitrain.bench.processes import Mpirun


class Jobs:
    """Stands for `mpirun`: rank 1 takes a second more, Keras two, and mpitrain a half; the first of all ten."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def run(self, size: int, code: str) -> list[float]:
        self.codes.append(code)
        seconds = 3.0 + 2.0 * ("import keras" in code) + 0.5 * ("mpitrain.init" in code) + 10.0 * (len(self.codes) == 1)
        return [seconds + rank for rank in range(size)]


def test_the_slowest_rank_counts_and_the_first_job_does_not() -> None:
    jobs = Jobs()
    (row,) = start.measure(cast(Mpirun, jobs), 2, 2)
    assert len(jobs.codes) == 1 + 2 * len(start.WAYS)
    assert row.figures == pytest.approx(
        {
            "MPI + TensorFlow s": 4.0,
            "with mpitrain.init s": 4.5,
            "init adds s": 0.5,
            "MPI + TensorFlow + Keras s": 6.0,
            "with all of mpitrain s": 6.5,
            "all adds s": 0.5,
        }
    )


def test_all_ways_are_programs() -> None:
    for way, code in start.WAYS.items():
        compile(start._BEFORE + code + start._AFTER, way, "exec")
