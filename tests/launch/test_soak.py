"""Twenty of the runs of `scripts/soak`, with a program that starts fast."""

from __future__ import annotations

import functools

import pytest

from tests.launch.conftest import Mpirun
from tests.launch.soak import Plan, run_once, undisturbed_seconds

RUNS, MPICH_RUNS = 20, 6
SEEDS = [pytest.param(seed, marks=[pytest.mark.mpich] if seed < MPICH_RUNS else []) for seed in range(RUNS)]

undisturbed = functools.lru_cache(maxsize=1)(lambda: undisturbed_seconds(Mpirun(), 3))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_at_a_random_moment(mpirun: Mpirun, seed: int) -> None:
    run_once(mpirun, Plan.of(seed), undisturbed())
