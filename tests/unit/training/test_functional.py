"""The library's functions on variables and data sets take any job."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from mpitrain.errors import ReplicaError
from mpitrain.training import functional
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_functions_of_a_job(ranks: int) -> None:
    def rank(world: World) -> Any:
        variable = tf.Variable([float(world.rank), 1.0])
        if world.size > 1:
            with pytest.raises(ReplicaError, match="now, ranks differ in 1 of 1 variable;"):
                functional.verify_replicas([variable], world=world)
        functional.broadcast_variables([variable], ranks - 1, world=world)
        functional.verify_replicas([variable], world=world)
        own = functional.shard(tf.data.Dataset.range(7), world=world)
        return variable.numpy().tolist(), [int(one) for one in own]

    for number, (values, own) in enumerate(run(ranks, rank)):
        assert values == [ranks - 1.0, 1.0]
        assert own == list(range(7))[number::ranks]
