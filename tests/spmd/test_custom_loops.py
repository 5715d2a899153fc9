"""Loops of the user's own: optimizers and tapes, eagerly and in a graph."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.errors import AgreedError, MismatchError
from mpitrain.strategies.strategy import Update, strategy_of
from tests.spmd.truth import WORLD, batches, merged

pytestmark = [pytest.mark.mpich, pytest.mark.usefixtures("double_precision")]  # also of learning rates
RANKS = range(WORLD.size)
several = pytest.mark.skipif(WORLD.size == 1, reason="there is nobody to differ from")


def weights(start: float = 0.0) -> list[Any]:
    return [
        keras.Variable(np.linspace(-1, 1, 15).reshape(5, 3) + start, dtype="float64"),
        keras.Variable(np.zeros(3) + start, dtype="float64"),
    ]


def loss_of(variables: list[Any], x: Any, y: Any) -> Any:
    logits = tf.matmul(x, variables[0]) + variables[1]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def reference(rate: float, pairs: list[Any]) -> list[Any]:
    """Plain gradient descent on the batches of all ranks."""
    variables = weights()
    for x, y in pairs:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(rate * gradient)
    return variables


def check(variables: list[Any], expected: list[Any]) -> None:
    mpitrain.verify_replicas(variables)
    for own, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.ranks(1, 2))])
def test_tape_with_samples(in_graph: bool, nested: bool) -> None:
    everyone = [batches(rank, [4, 2 + rank, 1]) for rank in RANKS]
    variables = weights(0.5 * WORLD.rank)  # rank 0's count

    def step(x: Any, y: Any) -> None:
        with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(variables, x, y)
        sources: Any = {"w": variables[0], "b": [variables[1]]} if nested else variables
        found = tape.gradient(loss, sources, samples=tf.shape(x)[0])
        gradients = [found["w"], found["b"][0]] if nested else found
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    run = tf.function(step, reduce_retracing=True) if in_graph else step
    whole = merged(everyone)
    # Eagerly the ranks but 0 had other weights in the first step: only rank 0's gradients count.
    if not in_graph:
        whole[0] = everyone[0][0]
    for x, y in everyone[WORLD.rank]:
        run(tf.constant(x), tf.constant(y))
    check(variables, reference(0.1, whole))


@pytest.mark.parametrize("in_graph", [False, True])
def test_optimizer_and_sample_count(in_graph: bool) -> None:
    everyone = [batches(rank, [4, 2 + rank]) for rank in RANKS]
    variables = weights()
    optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        with mpitrain.sample_count(tf.shape(x)[0]):
            optimizer.apply(tape.gradient(loss, variables))

    run = tf.function(step, reduce_retracing=True) if in_graph else step
    for x, y in everyone[WORLD.rank]:
        run(tf.constant(x), tf.constant(y))
    check(variables, reference(0.1, merged(everyone)))


@pytest.mark.parametrize("accumulation", [None, pytest.param(2, marks=pytest.mark.ranks(1, 2))])
def test_two_optimizers_in_one_step(accumulation: int | None) -> None:
    """As in a GAN: two updates a step, of different variables."""
    pairs = [weights(), weights()]
    options: Any = {"gradient_accumulation_steps": accumulation}
    rates = (0.1, 0.3)
    optimizers = [mpitrain.DistributedOptimizer(keras.optimizers.SGD(rate, **options)) for rate in rates]
    for optimizer, variables in zip(optimizers, pairs, strict=True):
        optimizer.build(variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        for optimizer, variables in zip(optimizers, pairs, strict=True):
            with tf.GradientTape() as tape:
                loss = loss_of(variables, x, y)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    everyone = [batches(rank, [4] * 3) for rank in RANKS]
    for x, y in everyone[WORLD.rank]:
        for _ in range(accumulation or 1):
            step(tf.constant(x), tf.constant(y))
    for rate, variables in zip(rates, pairs, strict=True):
        check(variables, reference(rate, merged(everyone)))


@pytest.mark.parametrize("in_graph", [False, True])
def test_joining_when_out_of_data(in_graph: bool) -> None:
    everyone = [batches(rank, [4] * (1 + 2 * (rank == 0))) for rank in RANKS]
    variables = weights()
    optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        with mpitrain.sample_count(tf.shape(x)[0]):
            optimizer.apply(tape.gradient(loss, variables), variables)

    optimizer.build(variables)
    run = tf.function(step) if in_graph else step
    for x, y in everyone[WORLD.rank]:
        run(tf.constant(x), tf.constant(y))
    strategy_of(WORLD).join()
    check(variables, reference(0.1, merged(everyone)))


@several
def test_different_gradients_name_ranks_and_the_first_difference() -> None:
    last = WORLD.size - 1
    optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.1))
    variables = [
        keras.Variable(np.zeros(3 + (index == 2 and WORLD.rank == last)), name=f"v{index}") for index in range(4)
    ]
    with pytest.raises(MismatchError, match=rf"(?s)ranks? 0.*v2 float32\[3\].*rank {last} .*v2 float32\[4\]"):
        optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    gradient = None if WORLD.rank == last else tf.zeros(3)
    with pytest.raises(MismatchError, match=f"(?s)of 2 gradients.*rank {last} .*of 1 gradient"):
        optimizer.apply([tf.zeros(3), gradient], variables[:2])
    mpitrain.barrier()


def test_tape_of_something_else_than_variables() -> None:
    x = tf.constant([float(WORLD.rank), 2.0])
    with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(x)
        y = tf.reduce_sum(x * x)
    mean = tape.gradient(y, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_allclose(mean, [WORLD.size - 1, 4.0])


def reduced(x: Any) -> Any:
    return mpitrain.all_reduce(x)


def taped(x: Any) -> Any:
    with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(x)
        loss = tf.reduce_sum(x * x)
    return tape.gradient(loss, x)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("function", [reduced, taped])
def test_what_xla_cannot_compile_is_refused(function: Any) -> None:
    if WORLD.size == 1 and function is taped:
        pytest.skip("nothing is exchanged")
    with pytest.raises(
        AgreedError, match=rf"^the tf.function {function.__name__} \(test_custom_loops.py:\d+\) has jit_c"
    ):
        tf.function(function, jit_compile=True)(tf.ones(3))
    np.testing.assert_array_equal(tf.function(reduced)(tf.ones(3)), np.ones(3))


@several
@pytest.mark.ranks(1, 2)
def test_gradients_without_a_mean_are_refused() -> None:
    variables = [tf.Variable([1, 2], name="counts"), tf.Variable([1.0, 2.0], shape=tf.TensorShape(None), name="free")]
    strategy = strategy_of()
    with pytest.raises(AgreedError, match=r"^the gradient of counts:0 is of int32, and a mean over ranks needs"):
        strategy.update([tf.constant([1, 2])], variables[:1], Update("update"))
    (mean,) = strategy.update([tf.constant([1.0, WORLD.rank])], variables[1:], Update("update"))
    np.testing.assert_allclose(mean, [1.0, (WORLD.size - 1) / 2])

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def unknown(gradient: Any) -> Any:
        return strategy.update([gradient], variables[1:], Update("update"))

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def told(gradient: Any) -> Any:
        return strategy.update([tf.ensure_shape(gradient, [2])], variables[1:], Update("update"))

    with pytest.raises(AgreedError, match=r"^the shape of the gradient of free:0 is not known while a graph is traced"):
        unknown(tf.constant([1.0, 2.0]))
    np.testing.assert_allclose(told(tf.constant([1.0, float(WORLD.rank)]))[0], [1.0, (WORLD.size - 1) / 2])
