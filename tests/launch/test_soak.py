"""Twenty of the runs of `scripts/soak`, with a program that starts fast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.conftest import Mpirun
from tests.launch.soak import ExchangingSoak

RUNS, MPICH_RUNS = 20, 6
SEEDS = [pytest.param(seed, marks=[pytest.mark.mpich] if seed < MPICH_RUNS else []) for seed in range(RUNS)]


@pytest.fixture(scope="module")
def soak() -> Iterator[ExchangingSoak]:
    mpirun = Mpirun()
    yield ExchangingSoak(mpirun)
    for job in mpirun.jobs:
        job.kill()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_at_a_random_moment(soak: ExchangingSoak, seed: int) -> None:
    soak.run(seed)
