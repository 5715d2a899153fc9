"""What every `Compressor` must do: tests take its name, a World and its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.collectives.engine import Averaging, CollectiveEngine
from mpitrain.comm.communicator import Buffer
from mpitrain.reduction.buckets import TensorSpec, plan_buckets
from mpitrain.reduction.compressor import COMPRESSORS
from mpitrain.reduction.reducer import Reducer
from mpitrain.world.world import World

SPECS = [
    TensorSpec("kernel", (40, 30), "float32"),
    TensorSpec("bias", (30,), "float32"),
    TensorSpec("one", (), "float32"),
]
EXACT = ("none",)
Step = Callable[..., Any]
Check = Callable[[str, CollectiveEngine, World], None]


def gradients(rank: int, update: int) -> list[Any]:
    """Of one rank, in the dtypes of SPECS."""
    random = np.random.default_rng([rank, update])
    return [random.standard_normal(spec.shape).astype(spec.dtype) for spec in SPECS]


def stepper(name: str, engine: CollectiveEngine, world: World) -> tuple[Sequence[int], Step, Any]:
    """Members of the one bucket of SPECS; a function for one update of it; the first state."""
    compressor, plan = COMPRESSORS[name], plan_buckets(SPECS)
    assert len(plan.buckets) == 1
    members = plan.buckets[0].members
    reducer = Reducer(world.communicator, world.agreement, world.all_reduce)

    def exchange(index: int, arrays: Sequence[Buffer], samples: float) -> list[Buffer]:
        return reducer.exchange(plan, index, arrays, samples)

    @tf.function(autograph=False)
    def step(own: list[tf.Tensor], state: Any, samples: tf.Tensor) -> Any:
        found: list[Any] = []
        engine.average(exchange, plan.buckets, samples, lambda averaging: found.extend(take(averaging, own, state)))
        return found

    def take(averaging: Averaging, own: list[tf.Tensor], state: Any) -> Any:
        return compressor.exchange(own, state, averaging)

    return members, step, compressor.init([SPECS[member] for member in members])


def check_what_is_sent(name: str, engine: CollectiveEngine, world: World) -> None:
    """The mean is the sum of share times what each rank has sent, at each update; the state keeps its form.

    In the second update the last rank has no data, and so sends nothing, whatever it remembers.
    """
    members, step, state = stepper(name, engine, world)
    assert len(set(map(str, world.communicator.all_gather_obj(arrays_of(state))))) == 1
    for update in range(3):
        samples = np.arange(1.0, world.size + 1)
        if update == 1 and world.size > 1:
            samples[-1] = 0.0
        mine = float(samples[world.rank])
        own = [tf.constant(gradients(world.rank, update)[member] * np.float32(mine > 0)) for member in members]
        mean, sent, new = step(own, state, tf.constant(mine, tf.float64))
        tf.nest.assert_same_structure(new, state)
        for before, after in zip(tf.nest.flatten(state), tf.nest.flatten(new), strict=True):
            assert (before.shape, before.dtype) == (after.shape, after.dtype)
        state = new
        of_all = world.communicator.all_gather_obj((arrays_of(mean), arrays_of(sent)))
        assert len({str([array.tobytes() for array in means]) for means, _ in of_all}) == 1
        for place in range(len(members)):
            assert mean[place].shape == sent[place].shape == own[place].shape
            wanted = sum(
                share * theirs[place] for share, (_, theirs) in zip(samples / samples.sum(), of_all, strict=True)
            )
            np.testing.assert_allclose(mean[place], wanted, rtol=1e-5, atol=1e-6)
            if name in EXACT:
                np.testing.assert_array_equal(sent[place], own[place])
            assert mine or not np.any(sent[place])


def check_infinite_gradients(name: str, engine: CollectiveEngine, world: World) -> None:
    """Where a rank has an infinite gradient, no rank has a finite mean of it; those of later updates are finite."""
    members, step, state = stepper(name, engine, world)
    for update in range(3):
        own = [gradients(world.rank, update)[member] for member in members]
        place = members.index(0)
        if update == 1 and world.rank == world.size - 1:
            own[place][1, 2] = np.inf
        mean, _, state = step([tf.constant(one) for one in own], state, tf.constant(1.0, tf.float64))
        arrays = arrays_of(mean)
        assert len({str([a.tobytes() for a in one]) for one in world.communicator.all_gather_obj(arrays)}) == 1
        assert np.isfinite(arrays[place][1, 2]) == (update != 1)
        assert update == 1 or all(np.all(np.isfinite(array)) for array in arrays)


def arrays_of(tensors: Any) -> list[Any]:
    """Of any structure."""
    return [np.asarray(tensor) for tensor in tf.nest.flatten(tensors)]


CHECKS: tuple[Check, ...] = (check_what_is_sent, check_infinite_gradients)
each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
each_compressor = pytest.mark.parametrize("name", COMPRESSORS)
