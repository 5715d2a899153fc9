"""Optimizers, variables and hooks of TensorFlow 1 on one rank; tests/spmd/test_horovod_parts.py has several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.horovod.basics import Adasum, Average
from mpitrain.horovod.gradients import Options
from mpitrain.horovod.legacy import BroadcastGlobalVariablesHook, LegacyOptimizer, broadcast_global_variables
from mpitrain.world.world import World
from tests.unit.horovod.job import run

v1 = tf.compat.v1
RATE = 0.5


def optimizer(passes: int = 1, average: bool = False, op: int = Average) -> LegacyOptimizer:
    return LegacyOptimizer(v1.train.GradientDescentOptimizer(RATE), Options(op), None, False, passes, average)


def trained(steps: int, **options: Any) -> list[float]:
    """What the variable is after each step, whose gradient is 1, 2, 3, ..."""
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("w", initializer=10.0, use_resource=True)
        factor = v1.placeholder(tf.float32, [])
        made = optimizer(**options)
        update = made.apply_gradients(made.compute_gradients(variable * factor, [variable]))
        session.run(v1.global_variables_initializer())
        found = []
        for step in range(1, steps + 1):
            session.run(update, {factor: float(step)})
            found.append(float(session.run(variable)))
        return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [9.5, 8.5, 7.0, 5.0]),
        ({"passes": 2}, [10.0, 8.5, 8.5, 5.0]),
        ({"passes": 2, "average": True}, [10.0, 9.25, 9.25, 7.5]),
        ({"passes": 2, "op": Adasum}, [9.5, 8.5, 7.0, 5.0]),  # of one rank its own moves
    ],
)
def test_several_steps_become_one_update(options: dict[str, Any], expected: list[float]) -> None:
    assert run(1, lambda world: trained(4, **options)) == [expected]


def test_it_is_the_optimizer_that_it_wraps() -> None:
    def rank(world: World) -> Any:
        with tf.Graph().as_default():
            variable = v1.get_variable("w", initializer=1.0)
            made = LegacyOptimizer(v1.train.MomentumOptimizer(RATE, 0.5), Options(), None, False, 1, False)
            made.apply_gradients(made.compute_gradients(2.0 * variable, [variable]))
            slot = made.get_slot(variable, "momentum")
            return made.get_name(), made.get_slot_names(), slot is not None, len(made.variables())

    assert run(1, rank) == [("DistributedMomentumOptimizer", ["momentum"], True, 1)]


def test_what_runs_eagerly_is_refused() -> None:
    def rank(world: World) -> None:
        with pytest.raises(ValueError, match="backward_passes_per_step above 1 is for graphs"):
            optimizer(passes=2)
        with pytest.raises(RuntimeError, match="broadcast_global_variables is for graphs of TensorFlow 1"):
            broadcast_global_variables(0)

    run(1, rank)


def test_the_hook_has_an_operation_for_each_graph() -> None:
    def rank(world: World) -> Any:
        hook: Any = BroadcastGlobalVariablesHook(0)
        operations: list[Any] = []
        values: list[float] = []
        for number in range(2):
            with tf.Graph().as_default() as graph:
                v1.get_variable("w", initializer=np.float32(number))
                hook.begin()
                operations.append(hook.bcast_op)
                hook.begin()
                assert hook.bcast_op is operations[-1]
                with v1.Session() as session:
                    session.run(v1.global_variables_initializer())
                    hook.after_create_session(session, None)
                    values.append(float(session.run(v1.global_variables()[0])))
                assert operations[-1].graph is graph
        return values

    assert run(1, rank) == [[0.0, 1.0]]
