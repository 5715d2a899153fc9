"""The ranks of a real job as servers and workers: the updates are those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.spmd.truth import WORLD
from tests.unit.strategies.parameter_server.served_job import check, run_here, train

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("1", "SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "global_clipnorm": 0.5}),
    ("2", "SGD", {"momentum": 0.9, "global_clipnorm": 0.5}),
    ("colocated", "Adam", {"clipnorm": 0.1}),
]


@pytest.mark.mpich
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("servers", "name", "options"), CASES)
def test_updates_are_those_of_one_process(servers: str, name: str, options: dict[str, Any]) -> None:
    serving = 0 if servers == "colocated" else int(servers)
    workers = WORLD.size - serving
    if WORLD.size < 2 or workers < 1:
        pytest.skip("no worker would remain beside a server")
    job = WORLD.communicator.split(range(WORLD.size))
    assert job is not None
    found = run_here(job, lambda world: train(world, name, options), servers=servers, max_shard_bytes=200)
    assert (found is None) == (WORLD.rank < serving)
    if found is not None:
        check(found, name, options, workers)
    values = WORLD.communicator.all_gather_obj(None if found is None else [a.tobytes() for a in found[0]])
    assert len({tuple(one) for one in values if one is not None}) == 1
    np.testing.assert_array_equal(WORLD.communicator.all_gather_obj(WORLD.rank), range(WORLD.size))
