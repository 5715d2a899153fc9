"""The library's functions on variables and data sets take any job."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from mpitrain.errors import AgreedError, ReplicaError
from mpitrain.training import functional
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (lambda rank: 3, ""),
        (lambda rank: 3 + rank // 2, "shuffled with other seeds on rank 2 "),
        (
            lambda rank: None,
            "shuffled without a seed, so that each rank takes samples that others take too",
        ),
    ],
)
def test_shares_are_of_one_order(seed: Any, words: str) -> None:
    """Of the second epoch too."""

    def rank(world: World) -> Any:
        mixed = tf.data.Dataset.range(30).shuffle(30, seed=seed(world.rank)).map(lambda one: one)
        if words:
            with pytest.raises(AgreedError, match=words):
                functional.shard(mixed, world=world)
            return [[], []]
        own = functional.shard(mixed, world=world).shuffle(30)  # which may have any order
        return [[int(one) for one in own] for _ in range(2)]

    tf.random.set_seed(None)  # an earlier test may have set one
    for epoch in zip(*run(3, rank), strict=True):
        assert words or sorted(one for own in epoch for one in own) == list(range(30))


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
