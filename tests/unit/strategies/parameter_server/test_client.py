"""A worker's end: what it sends, and what becomes of the answers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.strategies.parameter_server.connection import client_of
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.optimizer import DistributedOptimizer
from mpitrain.world.world import World
from tests.unit.strategies.parameter_server.served_job import run

SHAPE = (6, 2)


def updated(world: World, **options: Any) -> tuple[Any, Any]:
    """One update of this worker with a gradient of its rank, by plain SGD; the client, and the variable then."""
    variable = keras.Variable(np.arange(12.0).reshape(SHAPE), dtype="float32", name="v")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, **options), world=world)
    optimizer.apply([tf.fill(SHAPE, float(world.rank))], [variable])
    return client_of(world), variable


@pytest.mark.parametrize("servers", ["1", "2"])
def test_all_workers_get_what_the_servers_have(servers: str) -> None:
    def work(world: World) -> Any:
        client, variable = updated(world)
        (session,) = client.sessions.values()
        assert client.in_step
        assert (session.begun, session.discard, session.dropped) == (True, False, 0)
        assert session.coming == session.targets == {}
        assert client.pushing_seconds > 0
        assert client.waiting_seconds > 0
        strategy_of(world).join()
        return variable.numpy(), len({part.server for part in session.layout.parts})

    found = run(2 + int(servers), work, servers=servers, max_shard_bytes=24)
    for value, used in found:
        np.testing.assert_allclose(value, np.arange(12.0).reshape(SHAPE) - 0.5)
        assert used == int(servers)


def test_half_the_bytes_travel_rounded() -> None:
    def work(world: World) -> Any:
        variable = keras.Variable(np.zeros(3), dtype="float32", name="v")
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), world=world)
        optimizer.apply([tf.constant([1.0, 2049.0, 1e-9])], [variable])
        strategy_of(world).join()
        return variable.numpy().tolist()

    assert run(3, work, compression="float16") == [[-1.0, -2048.0, 0.0]] * 2


def test_a_worker_says_once_that_it_stops() -> None:
    def work(world: World) -> int:
        client, _ = updated(world)
        strategy_of(world).join()
        said: list[int] = []
        say = client.channel.say

        def noted(server: int, *rest: Any) -> None:
            said.append(server)
            say(server, *rest)

        object.__setattr__(client.channel, "say", noted)
        client.stop()
        client.stop()
        return len(said)

    assert run(3, work) == [1, 1]
