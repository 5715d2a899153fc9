"""Peaks of memory, and what is allowed."""

from __future__ import annotations

import resource
from typing import Any, cast

import keras
import numpy as np
import pytest

from mpitrain.bench import memory
from mpitrain.bench.processes import Mpirun

MIB = 1 << 20


class Jobs:
    """Stands for `mpirun`: ranks of jobs that need 100 MiB, and 10 more each where there are several."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, size: int, code: str) -> dict[str, Any]:
        assert "print_peak('mlp50k', 16, 4)" in code
        self.sizes.append(size)
        return {"peak_bytes": [100 * MIB + 10 * MIB * rank for rank in range(size)], "largest_bucket_bytes": 16 * MIB}


def test_the_rank_that_needs_most_counts() -> None:
    jobs = Jobs()
    (row,) = memory.measure(cast(Mpirun, jobs), ["mlp50k"], 3, 16, 2)
    assert sorted(jobs.sizes) == [1, 1, 3, 3]
    assert row.case == {"model": "mlp50k", "ranks": 3, "batch": 16}
    assert row.figures == {
        "alone MiB": 100.0,
        "exchanged MiB": 120.0,
        "above MiB": 20.0,
        "largest bucket MiB": 16.0,
        "allowed MiB": 80.0,
        "above / allowed": 0.25,
    }


def test_the_peak_is_that_of_the_kernel() -> None:
    told = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert memory.peak_bytes() == pytest.approx(told, rel=0.01)


def test_the_largest_bucket_is_one_of_the_plan() -> None:
    big = keras.Variable(np.zeros(3 << 20, np.float32), name="big")
    small = keras.Variable(np.zeros(10, np.float32), name="small")
    assert memory.largest_bucket_bytes([small]) == 40
    assert memory.largest_bucket_bytes([small, big]) == 12 * MIB
