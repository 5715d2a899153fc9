"""What every `Strategy` must do: tests take the World of a rank, whose strategy it is, and a way to call it.

All that is expected is computed: each rank knows the gradients of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.strategies.replicas import verify_replicas
from mpitrain.strategies.strategy import Update, strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.optimizer import DistributedOptimizer, hook_of
from mpitrain.world.world import World
from tests.contracts.engine import Way
from tests.unit import job
from tests.unit.strategies.parameter_server import served_job

Check = Callable[[World, Way], None]
OUT_OF_STEP = ("asynchronous",)
Begin = Callable[[int, list[Any]], None]
# By name, a job of so many ranks that train, each with that strategy.
JOBS: dict[str, Callable[[int, Callable[[World], Any]], list[Any]]] = {
    "local": job.run,
    "all_reduce": job.run,
    "parameter_server": lambda size, body: served_job.run(size + 1, body, servers="1"),
    "asynchronous": lambda size, body: served_job.run(size + 1, body, servers="1", mode="async"),
}
STEPS, ROWS = 4, 7
SHAPES: list[tuple[int, ...]] = [(ROWS, 2), (3,), (), (5,)]  # the first with rows, the last never with a gradient


def samples(rank: int, step: int) -> float:
    """Of how many samples the gradients of a rank are."""
    return float(1 + (2 * rank + step) % 3)


def gradients(rank: int, step: int) -> list[Any]:
    """Of any rank: rows, of which two are of one index, dense ones, and none."""
    random = np.random.default_rng(100 * rank + step)
    rows = tf.IndexedSlices(
        tf.constant(random.normal(size=(3, 2))), tf.constant([rank % ROWS, 1, 1]), tf.constant([ROWS, 2], tf.int64)
    )
    return [rows, *[tf.constant(random.normal(size=shape)) for shape in SHAPES[1:-1]], None]


def dense(gradient: Any) -> Any:
    """Rows as a tensor."""
    return tf.convert_to_tensor(gradient).numpy()


def variables() -> list[Any]:
    """Of one rank, by names that all have."""
    random = np.random.default_rng(3)
    return [keras.Variable(random.normal(size=shape), "float64", name=f"v{i}") for i, shape in enumerate(SHAPES)]


def optimizer(momentum: float) -> Any:
    """Whose numbers are exact."""
    return keras.optimizers.SGD(0.5, momentum=momentum, name="sgd")


def truth(last: Callable[[int], int], size: int, begin: Begin | None = None, momentum: float = 0.0) -> Any:
    """Variables and optimizer of one process with the samples of all ranks.

    Args:
        last: of each rank, how many steps it has data for.
        size: number of ranks.
        begin: changes variables before a step.
        momentum: of the optimizer.
    """
    kept, plain = variables(), optimizer(momentum)
    plain.build(kept)
    for step in range(STEPS):
        if begin is not None:
            begin(step, kept)
        ranks = [rank for rank in range(size) if step < last(rank)]
        total = sum(samples(rank, step) for rank in ranks)
        means: list[Any] = [np.zeros(shape) for shape in SHAPES]
        for rank in ranks:
            for position, gradient in enumerate(gradients(rank, step)[:-1]):
                means[position] = means[position] + dense(gradient) * (samples(rank, step) / total)
        plain.apply([*map(tf.constant, means[:-1]), None], kept)
    return kept, plain


def train(world: World, way: Way, steps: int, begin: Begin | None = None, momentum: float = 0.0) -> Any:
    """Collective: so many steps of this rank; variables and optimizer. With momentum rows go as dense gradients."""
    kept, made = variables(), optimizer(momentum)
    made.build(kept)
    DistributedOptimizer(made, world=world)

    @way
    def apply(count: Any, *own: Any) -> None:
        with sample_count(count):
            made.apply([*own, None], kept)

    for step in range(steps):
        if begin is not None:
            begin(step, kept)
            hook = hook_of(made)
            if hook is not None:
                hook.exchange.begin_anew(hook.update)
        own = gradients(world.rank, step)[:-1]
        apply(tf.constant(samples(world.rank, step)), *(map(tf.convert_to_tensor, own) if momentum else own))
    return kept, made


def check_close(found: list[Any], expected: list[Any]) -> None:
    """To the last bits, since all of it is in double precision."""
    for mine, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), true.numpy(), rtol=1e-12, atol=1e-12)


def of_ranks_in_step(check: Check) -> Check:
    """A check of the numbers that one process gives: nothing for a strategy whose ranks are not in step."""

    @functools.wraps(check)
    def checked(world: World, way: Way) -> None:
        if strategy_of(world).in_step:
            check(world, way)

    return checked


@of_ranks_in_step
def check_updates(world: World, way: Way) -> None:
    """N ranks make of their gradients what one makes of all samples, and are alike to the bit after each update."""
    kept, _ = train(world, way, STEPS)
    check_close(kept, truth(lambda rank: STEPS, world.size)[0])
    verify_replicas(kept, "at the end", world=world)


def check_start(world: World, way: Way) -> None:
    """All ranks begin with the values of rank 0, rows included that no update changes."""
    kept, made = variables(), optimizer(0.0)
    for variable in kept[:-1]:
        variable.assign(variable + float(world.rank))
    DistributedOptimizer(made, world=world)
    rows = tf.IndexedSlices(tf.zeros((1, 2), "float64"), tf.constant([0]), tf.constant([ROWS, 2], tf.int64))
    apply = way(lambda *own: made.apply([*own, None], kept))
    apply(rows, *[tf.zeros(shape, "float64") for shape in SHAPES[1:-1]])
    check_close(kept, variables())


@of_ranks_in_step
def check_state(world: World, way: Way) -> None:
    """The optimizer's own variables are those of one process, where and when a checkpoint asks for them."""
    _, made = train(world, way, STEPS, momentum=0.25)
    hook = hook_of(made)
    if hook is not None:
        hook.exchange.fetch_state(hook.update)
        world.communicator.barrier()
    if world.is_root or (hook is not None and hook.exchange.replicates_state):
        check_close(made.variables, truth(lambda rank: STEPS, world.size, momentum=0.25)[1].variables)


@of_ranks_in_step
def check_begin_anew(world: World, way: Way) -> None:
    """Variables that a program changes between updates, on all ranks, are those of the next update."""

    def begin(step: int, kept: list[Any]) -> None:
        if step == 2:
            kept[1].assign(kept[1] * 0.0 + 2.0)

    kept, _ = train(world, way, STEPS, begin)
    check_close(kept, truth(lambda rank: STEPS, world.size, begin)[0])


@of_ranks_in_step
def check_ranks_without_data(world: World, way: Way) -> None:
    """Ranks that run out of data count no more, and have the variables of the others when all have joined."""

    def last(rank: int) -> int:
        return STEPS - 2 * (rank % 2)

    kept, _ = train(world, way, last(world.rank))
    strategy_of(world).join()
    check_close(kept, truth(last, world.size)[0])
    verify_replicas(kept, "at the end", world=world)


@of_ranks_in_step
def check_tape(world: World, way: Way) -> None:
    """Gradients that the program applies itself come back as their mean over the samples of all ranks."""
    kept = variables()

    @way
    def mean(count: Any, *own: Any) -> Any:
        with sample_count(count):
            return strategy_of(world).update([*own, None], kept, Update("gradients of a test"))[:-1]

    found = mean(tf.constant(samples(world.rank, 0)), *gradients(world.rank, 0)[:-1])
    total = sum(samples(rank, 0) for rank in range(world.size))
    for position, one in enumerate(found):
        all_own = [gradients(rank, 0)[position] for rank in range(world.size)]
        expected = sum(dense(own) * (samples(rank, 0) / total) for rank, own in enumerate(all_own))
        np.testing.assert_allclose(dense(one), expected, rtol=1e-12, atol=1e-12)


def check_facts(world: World, way: Way) -> None:
    """What is known of the updates: their number, their samples, and what the latest header said."""
    strategy = strategy_of(world)
    assert (strategy.world, strategy.agreed, strategy.statistics.updates) == (world, None, 0)
    assert [strategy.next_number() for _ in range(2)] == [0, 1]
    train(world, way, STEPS)
    if strategy.exchanges:
        assert strategy.statistics.updates == world.activity.updates == STEPS
    if strategy.exchanges and strategy.in_step:
        every = [samples(rank, step) for rank in range(world.size) for step in range(STEPS)]
        assert strategy.statistics.samples_global == sum(every)
    if strategy.agreed is not None:
        assert strategy.agreed.samples.tolist() == [samples(rank, STEPS - 1) for rank in range(world.size)]
    strategy.count_from(9)
    assert strategy.statistics.updates == world.activity.updates == 9


def check_leave(world: World, way: Way) -> None:
    """All ranks come to the end together; one that is there waits for those that still exchange."""
    train(world, way, 2)
    arrived: list[Any] = world.communicator.all_gather_obj(world.rank)
    strategy_of(world).leave()
    assert arrived == list(range(world.size))


each_check = pytest.mark.parametrize(
    "check",
    [
        check_start,
        check_updates,
        check_state,
        check_begin_anew,
        check_ranks_without_data,
        check_tape,
        check_facts,
        check_leave,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
