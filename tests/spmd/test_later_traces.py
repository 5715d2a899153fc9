"""Exchanges that first appear in a later trace of a function, also inside branches and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
import mpitrain.horovod.keras as hvd_keras
import mpitrain.horovod.tensorflow as hvd
from mpitrain.collectives import ordering

world = mpitrain.init()
hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
MEAN = (SIZE + 1) / 2  # of x, which is rank + 1
TOTAL = MEAN * SIZE


@pytest.fixture(autouse=True)
def first_exchange() -> None:
    """As in a process that has traced no exchange so far."""
    ordering._turn.cache_clear()


def own_tape(x: Any) -> Any:
    with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = variable * x
    return tape.gradient(loss, [variable])[0]


def horovod_tape(x: Any) -> Any:
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        loss = variable * x
    return tape.gradient(loss, [variable])[0]


def gradient_of_allreduce(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        product = hvd.allreduce(x, op=hvd.Sum) * x
    return tape.gradient(product, x)


def sparse(x: Any) -> Any:
    with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(tf.gather(table, [0])) * x
    return tf.reduce_sum(tf.convert_to_tensor(tape.gradient(loss, [table])[0]))


def optimizer_of(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    weight = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    wrapped = wrap(optimizer)

    def step(x: Any) -> Any:
        weight.assign(0.0)
        wrapped.apply([x], [weight])
        return -weight.value

    return step


variable, table = tf.Variable(1.0), tf.Variable([1.0, 2.0])
EXCHANGES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "all_reduce": (mpitrain.all_reduce, MEAN),
    "all_gather": (lambda x: mpitrain.all_gather(x)[-1], SIZE),
    "broadcast": (lambda x: mpitrain.broadcast(x, SIZE - 1), SIZE),
    "reduce_scatter": (lambda x: mpitrain.reduce_scatter(tf.fill([SIZE], x))[0], MEAN),
    "all_to_all": (lambda x: mpitrain.all_to_all(tf.fill([SIZE], x))[0][-1], SIZE),
    "tape": (own_tape, MEAN),
    "sparse": (sparse, MEAN),
    "optimizer": (optimizer_of(mpitrain.DistributedOptimizer), MEAN),
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), TOTAL),
    "allreduce of rows": (
        lambda x: hvd.allreduce(tf.IndexedSlices(tf.reshape(x, [1]), tf.constant([0])), op=hvd.Sum).values[-1],
        SIZE,
    ),
    "grouped_allreduce": (lambda x: hvd.grouped_allreduce([x, x])[1], MEAN),
    "allgather": (lambda x: hvd.allgather(x)[-1], SIZE),
    "hvd.broadcast": (lambda x: hvd.broadcast(x, SIZE - 1), SIZE),
    "alltoall": (lambda x: hvd.alltoall(tf.fill([SIZE], x))[-1], SIZE),
    "reducescatter": (lambda x: hvd.reducescatter(tf.fill([SIZE], x))[0], MEAN),
    "gradient of allreduce": (gradient_of_allreduce, 2 * TOTAL),
    "Keras' allreduce": (hvd_keras.allreduce, MEAN),
    "hvd.tape": (horovod_tape, TOTAL),
    "hvd.optimizer": (optimizer_of(hvd.DistributedOptimizer), MEAN),
}


def in_branch(call: Callable[[Any], Any], x: Any) -> Any:
    return tf.cond(x > 0.0, lambda: tf.cast(call(x), tf.float32), lambda: x)


def in_loop(call: Callable[[Any], Any], x: Any) -> Any:
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.cast(call(x), tf.float32)), [0, x])[1]


WHERE: dict[str, Callable[..., Any]] = {"plain": lambda call, x: call(x), "branch": in_branch, "loop": in_loop}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", EXCHANGES)
def test_first_in_a_second_trace(name: str, where: str) -> None:
    call, expected = EXCHANGES[name]

    @tf.function(autograph=False)
    def step(x: Any, exchange: bool) -> Any:
        return WHERE[where](call, x) if exchange else x + 1.0

    x = tf.constant(RANK + 1.0)
    step(x, False)
    for _ in range(2):
        np.testing.assert_allclose(step(x, True), expected)


@pytest.mark.ranks(2)
def test_first_in_a_second_trace_among_some_ranks() -> None:
    one = hvd.ProcessSet([RANK])
    sets = [hvd.add_process_set(one if rank == RANK else [rank]) for rank in range(SIZE)] if SIZE > 1 else []

    @tf.function(autograph=False)
    def step(x: Any, exchange: bool) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, process_set=one if sets else hvd.global_process_set) if exchange else x

    step(tf.constant(3.0), False)
    assert float(step(tf.constant(3.0), True)) == 3.0
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [mpitrain.DistributedOptimizer, hvd.DistributedOptimizer])
def test_an_optimizer_that_accumulates_is_wrapped_in_a_second_trace(wrap: Callable[[Any], Any]) -> None:
    weight = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer.build([weight])

    @tf.function(autograph=False)
    def step(x: Any, exchange: bool) -> None:
        if exchange:
            wrap(optimizer).apply([x], [weight])

    step(tf.constant(RANK + 1.0), False)
    for _ in range(2):
        step(tf.constant(RANK + 1.0), True)
    assert float(weight.numpy()) == -MEAN


@pytest.mark.ranks(2)
def test_join_in_a_second_trace() -> None:
    @tf.function(autograph=False)
    def step(join: bool) -> Any:
        return hvd.join() if join else tf.constant(0)

    step(False)
    assert int(step(True)) == SIZE - 1
