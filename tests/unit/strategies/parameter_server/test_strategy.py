"""What parameter servers' workers look at before a gradient leaves."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import NonFiniteError, UsageError
from mpitrain.strategies.parameter_server.strategy import servers_of
from mpitrain.strategies.strategy import Update, strategy_of
from mpitrain.training.optimizer import DistributedOptimizer
from mpitrain.world.world import World
from tests.unit import job
from tests.unit.strategies.parameter_server.served_job import run


def step(world: World, gradient: list[float]) -> Any:
    variable = keras.Variable([1.0, 1.0], name="v")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), world=world)
    optimizer.apply([tf.constant(gradient)], [variable])
    strategy_of(world).join()
    return variable.numpy().tolist()


@pytest.mark.parametrize("action", ["stop", "warn", "ignore"])
def test_what_is_not_finite_is_traced_to_worker_and_variable(action: str, capfd: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> Any:
        strategy_of(world).finite.action = action
        if action != "stop":
            return step(world, [0.5, float("inf")])
        with pytest.raises(NonFiniteError, match=r"gradient of v is not finite on rank 1 .* in update 1"):
            step(world, [0.5, float("nan")])
        return step(world, [0.5, 0.5])

    assert run(2, work) == [[0.5, 0.5] if action == "stop" else [0.5, float("-inf")]]
    assert capfd.readouterr().err.count("mpitrain: warning: the gradient of v is not finite") == (action == "warn")


def test_gradients_that_are_added_up_are_refused() -> None:
    def work(world: World) -> None:
        with pytest.raises(UsageError, match="parameter servers average gradients"):
            DistributedOptimizer(keras.optimizers.SGD(1.0), world=world, loss_is="sum")

    run(2, work)


def test_of_tapes_the_workers_take_the_mean_among_themselves() -> None:
    def work(world: World) -> Any:
        variable = tf.Variable([0.0])
        (mean,) = strategy_of(world).update([tf.constant([float(world.rank)])], [variable], Update("of a tape"))
        assert np.array_equal(variable.numpy(), [0.0])
        return mean.numpy().tolist()

    assert run(3, work) == [[0.5], [0.5]]


def test_ranks_that_average_have_no_servers() -> None:
    assert job.run(2, servers_of) == [None, None]
    assert [served is not None for served in run(3, servers_of)] == [True, True]
