"""Parameter servers without lockstep, with rows, in `fit`, and on a rank that works too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import AgreedError, RankLostError, TooFewRanksError
from mpitrain.reduction.buckets import TensorSpec
from mpitrain.strategies.parameter_server import queries
from mpitrain.strategies.parameter_server.connection import client_of
from mpitrain.strategies.parameter_server.layout import layout, setup_of
from mpitrain.strategies.parameter_server.messages import Kind, Message
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.programs import pull_rows
from mpitrain.strategies.parameter_server.server_parts import ServerPart
from mpitrain.strategies.parameter_server.worker_optimizer import served_of
from mpitrain.strategies.strategy import strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.optimizer import DistributedOptimizer
from mpitrain.world import shrink
from mpitrain.world.world import World
from tests.unit.strategies.parameter_server.served_job import DeathError, check, gradients_of, run, samples_of, train

SHAPES: list[tuple[int, ...]] = [(30, 3), (3,)]
STEPS = 4
RATE = 0.1
ROWS = 50


def variables() -> list[Any]:
    return [keras.Variable(np.full(shape, 1.0), dtype="float64", name=f"v{i}") for i, shape in enumerate(SHAPES)]


def push_all(world: World, delay_seconds: float = 0.0) -> tuple[list[Any], dict[str, Any]]:
    """All steps of this worker with plain SGD; the values when all are done, and what the server counted."""
    kept = variables()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE), world=world)
    for step in range(STEPS):
        if world.rank == 1 and step:  # in the first the servers begin
            time.sleep(delay_seconds)
        optimizer.apply([tf.constant(g) for g in gradients_of(world.rank, step, SHAPES)], kept)
    strategy_of(world).join()
    served = served_of(optimizer)
    assert served is not None
    return [v.numpy() for v in kept], served.counts()


def total(steps: dict[int, range]) -> list[Any]:
    """What SGD makes of the gradients of some steps of some workers, in whatever order they come."""
    values = [np.full(shape, 1.0) for shape in SHAPES]
    for worker, made in steps.items():
        for step in made:
            for value, gradient in zip(values, gradients_of(worker, step, SHAPES), strict=True):
                np.subtract(value, RATE * gradient, out=value)
    return values


@pytest.mark.parametrize("options", [{}, {"max_staleness": 0}, {"warmup_steps": 2}], ids=str)
def test_async_applies_every_gradient_once(options: dict[str, Any]) -> None:
    """But the first of a worker that begins when others have made updates: it is of other parameters, and dropped."""
    workers = 3
    found = run(workers + 2, push_all, servers="2", mode="async", max_shard_bytes=300, **options)
    for values, counts in found:
        dropped = counts["dropped"]
        assert set(dropped) <= {"1", "2"}
        assert set(dropped.values()) <= {1}
        if "warmup_steps" in options:
            assert len(dropped) == workers - 1
        expected = total({worker: range(str(worker) in dropped, STEPS) for worker in range(workers)})
        for value, one in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, one, rtol=1e-6, atol=1e-6)
        assert counts["updates"] == workers * STEPS - len(dropped) == sum(counts["staleness"].values())


@pytest.mark.parametrize("options", [{"mode": "async"}, {"backup_workers": 1}], ids=str)
def test_the_first_gradient_of_a_worker_that_is_late_is_dropped(options: dict[str, Any]) -> None:
    def work(world: World) -> tuple[list[Any], dict[str, Any]]:
        if world.rank == 1:
            time.sleep(2.0)
        return push_all(world)

    for values, counts in run(3, work, servers="1", **options):
        assert counts["dropped"]["1"] >= 1
        assert counts["updates"] + sum(counts["dropped"].values()) == 2 * STEPS
        if options.get("mode") == "async":
            assert counts["dropped"] == {"1": 1}
            for value, expected in zip(values, total({0: range(STEPS), 1: range(1, STEPS)}), strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


def test_backup_workers_do_not_wait_for_the_slow_one() -> None:
    found = run(3, lambda world: push_all(world, 1.0), servers="1", backup_workers=1)
    for _, counts in found:
        # Each update is of one gradient: the slow worker's last ones come when the other has no data left.
        assert counts["updates"] + sum(counts["dropped"].values()) == 2 * STEPS
        assert counts["updates"] > STEPS
        assert counts["dropped"]["1"] > 0


def lookup(world: World, name: str, step: int) -> tuple[Any, Any]:
    """Rows that a worker touches in a step, some of them twice, and their gradients."""
    random = np.random.default_rng(77 * world.rank + step)
    return random.normal(size=(6, 2)), random.integers(0, ROWS, 6)


def train_rows(world: World, name: str) -> tuple[Any, Any, int]:
    table = keras.Variable(np.ones((ROWS, 2)), dtype="float64", name="table")
    bias = keras.Variable(np.ones(2), dtype="float64", name="bias")
    optimizer = DistributedOptimizer(getattr(keras.optimizers, name)(RATE), world=world)
    client = client_of(world)
    touched = 0
    for step in range(STEPS):
        values, indices = lookup(world, name, step)
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([ROWS, 2], tf.int64))
        optimizer.apply([slices, tf.constant(np.ones(2))], [table, bias])
        touched += 1
    session = client.sessions[0]
    asked = np.array([ROWS - 1, 0, 7])
    strategy_of(world).join()
    np.testing.assert_array_equal(queries.rows(client.channel, session, 0, asked), table.numpy()[asked])
    return table.numpy(), bias.numpy(), touched


def rows_by_hand(name: str, workers: int) -> Any:
    """SGD, or Adam that leaves alone the rows, and their moments, that no gradient came for."""
    table, m, v = np.ones((ROWS, 2)), np.zeros((ROWS, 2)), np.zeros((ROWS, 2))
    for step in range(STEPS):
        gradient = np.zeros((ROWS, 2))
        for worker in range(workers):
            random = np.random.default_rng(77 * worker + step)
            values, indices = random.normal(size=(6, 2)), random.integers(0, ROWS, 6)
            np.add.at(gradient, indices, values / workers)
        hit = np.abs(gradient).sum(axis=1) > 0
        if name == "SGD":
            table -= RATE * gradient
            continue
        m[hit] += 0.1 * (gradient - m)[hit]
        v[hit] += 0.001 * (gradient**2 - v)[hit]
        rate = RATE * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        table[hit] -= (rate * m / (np.sqrt(v) + 1e-7))[hit]
    return table


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_rows_travel_and_are_applied_as_rows(name: str) -> None:
    for table, _, _ in run(4, lambda world: train_rows(world, name), servers="2", max_shard_bytes=300):
        np.testing.assert_allclose(table, rows_by_hand(name, 2), rtol=1e-5, atol=1e-5)


def pull_own_rows(world: World, in_graph: bool) -> None:
    """Rows of the other worker come when they are asked for, and at the end; see `rows_by_hand`."""
    table = keras.Variable(np.ones((ROWS, 2)), dtype="float64", name="table")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE), world=world)

    def pull_eagerly(indices: Any) -> Any:
        return pull_rows(optimizer, table, indices)

    pull = tf.function(pull_eagerly) if in_graph else pull_eagerly
    own, others = set[int](), set[int]()
    np.testing.assert_array_equal(pull([3]), [[1.0, 1.0]])  # no server has begun
    for step in range(STEPS):
        values, indices = lookup(world, "", step)
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([ROWS, 2], tf.int64))
        optimizer.apply([slices], [table])
        own |= set(indices)
        others |= set(np.random.default_rng(77 * (1 - world.rank) + step).integers(0, ROWS, 6))
    assert others - own  # else this tests nothing
    np.testing.assert_array_equal(table.numpy()[sorted(others - own)], 1.0)
    expected = rows_by_hand("SGD", 2)
    asked = np.array(sorted(others - own)).reshape(-1, 1)
    pulled = pull(asked)
    np.testing.assert_allclose(pulled, expected[asked[:, 0]], rtol=1e-6)
    np.testing.assert_array_equal(table.numpy()[asked[:, 0]], pulled)
    strategy_of(world).join()
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_worker_gets_the_rows_that_it_asks_for(in_graph: bool) -> None:
    run(4, lambda world: pull_own_rows(world, in_graph), servers="2", max_shard_bytes=300, rows="pushed")


def push_colocated(world: World) -> list[Any]:
    kept = variables()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE), world=world)
    for step in range(STEPS):
        with sample_count(float(samples_of(world.rank, step))):
            optimizer.apply([tf.constant(g) for g in gradients_of(world.rank, step, SHAPES)], kept)
    return [v.numpy() for v in kept]


@pytest.mark.parametrize("compression", ["none", "float16"])
def test_a_server_that_works_too(compression: str) -> None:
    ranks = 3
    found = run(ranks, push_colocated, servers="colocated", compression=compression)
    assert len(found) == ranks
    values = [np.full(shape, 1.0) for shape in SHAPES]
    for step in range(STEPS):
        weights = np.array([samples_of(worker, step) for worker in range(ranks)], np.float64)
        for position, value in enumerate(values):
            everyone = [gradients_of(worker, step, SHAPES)[position] for worker in range(ranks)]
            np.subtract(value, RATE * np.average(everyone, axis=0, weights=weights), out=value)
    tolerance = 1e-6 if compression == "none" else 5e-3
    for one in found:
        for value, expected in zip(one, values, strict=True):
            np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)


def push_until_one_dies(
    world: World, dying: int, deadly_step: int
) -> tuple[list[Any], Mapping[int, int], dict[str, Any]]:
    """As `push_all`, where one worker dies; those that are left ask the servers which of their steps were made."""
    number = world.numbers[world.rank]
    kept = variables()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE), world=world)
    strategy, steps = strategy_of(world), STEPS + 6
    step = 0
    while step < steps:
        if number == dying and step == deadly_step:
            client = client_of(world)
            client.channel.start(0, Message(Kind.PUSH, session=0, samples=1.0).pack())  # and no more
            raise DeathError
        try:
            optimizer.apply([tf.constant(g) for g in gradients_of(number, step, SHAPES)], kept)
            if step == 0:  # from the first update of all on
                strategy.join()
            if step == steps - 1:
                strategy.join()
            step += 1
        except RankLostError:
            left = shrink.shrink(world)
            assert left.lost == (dying,)
            assert dying not in world.numbers
            strategy.catch_up()
            step = strategy.done()[number]
    served = served_of(optimizer)
    assert served is not None
    return [v.numpy() for v in kept], strategy.done(), served.counts()


@pytest.mark.parametrize("dying", [1, 3])
@pytest.mark.parametrize(
    "options", [{"mode": "async"}, {"mode": "async", "max_staleness": 0}, {"backup_workers": 2}], ids=str
)
def test_the_others_go_on_without_a_worker_that_dies(options: dict[str, Any], dying: int) -> None:
    found = run(4, lambda world: push_until_one_dies(world, dying, 3), dying=[dying], **options)
    assert len(found) == 2
    values, done, counts = found[0]
    assert done == {number: 3 if number == dying else STEPS + 6 for number in (1, 2, 3)}
    assert counts["updates"] + sum(counts["dropped"].values()) == sum(done.values())
    for value, other in zip(values, found[1][0], strict=True):
        np.testing.assert_array_equal(value, other)
    if options.get("mode") == "async":
        left = sorted(number for number in done if number != dying)
        dropped = {dying if worker == "-1" else left[int(worker)] for worker in counts["dropped"]}  # their first
        assert set(counts["dropped"].values()) <= {1}
        expected = total({number: range(number in dropped, steps) for number, steps in done.items()})
        for value, wanted in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)


def test_the_last_worker_that_dies_ends_the_job() -> None:
    def work(world: World) -> str:
        optimizer, kept = DistributedOptimizer(keras.optimizers.SGD(RATE), world=world), variables()
        optimizer.apply([tf.constant(g) for g in gradients_of(world.rank, 0, SHAPES)], kept)
        strategy_of(world).join()
        raise DeathError

    with pytest.raises(TooFewRanksError, match="no worker is left of 1"):
        run(2, work, dying=[1], mode="async")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "sync"}, "--mode sync waits for each worker.*--mode async, --backup-workers 1"),
        ({"mode": "async", "servers": "colocated"}, "--ps colocated does not go on.*--ps 1"),
    ],
    ids=str,
)
def test_what_does_not_go_on_without_a_worker_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(AgreedError, match=text):
        run(3, lambda world: None, dying=[2], **options)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "global_clipnorm": 0.5}),
    ("Adam", {"clipnorm": 0.1, "amsgrad": True}),
    ("AdamW", {"clipvalue": 0.2, "use_ema": True, "ema_momentum": 0.5}),
    ("Nadam", {"global_clipnorm": 0.5}),
    ("Adafactor", {"clipnorm": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{c[0]}-{len(c[1])}" for c in CASES])
def test_updates_are_those_of_one_process(name: str, options: dict[str, Any]) -> None:
    found = run(4, lambda world: train(world, name, options), servers="2", max_shard_bytes=200)
    assert len(found) == 2
    for one in found:
        check(one, name, options, 2)


@pytest.mark.usefixtures("double_precision")
def test_learning_rates_have_the_precision_of_the_workers() -> None:
    specs = [TensorSpec("v", (2,), "float64", False)]
    setup = {
        **setup_of("update", specs, 1024, []),
        "optimizer": keras.optimizers.serialize(keras.optimizers.SGD(0.0)),
        "floatx": "float64",
        "decayed": [True],
        "constraints": [None],
    }
    keras.config.set_floatx("float32")  # a process that has not run the script
    part = ServerPart(layout(setup, 1, ServerOptions()).parts[0], specs, setup, True)
    part.update(np.ones(2), RATE, 1.0, [1.0])
    assert part.packed().tolist() == [-RATE, -RATE]
