"""What a step of a script's own does with gradients before an optimizer has their mean: seen, and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from mpitrain.training.gradient_use import GradientUses, told, watching

Gradients = list[Any]
Change = Callable[[Gradients, list[Any]], Gradients]
NORM = keras.metrics.Mean(name="norm")


def perturbing(gradients: Gradients, variables: list[Any]) -> Gradients:
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_add(0.01 * gradient)
    return gradients


def noting(gradients: Gradients, variables: list[Any]) -> Gradients:
    NORM.update_state(tf.linalg.global_norm(gradients))
    return gradients


def accumulating(gradients: Gradients, variables: list[Any]) -> Gradients:
    return [slot.assign_add(gradient) for slot, gradient in zip(SLOTS, gradients, strict=True)]


SLOTS = [tf.Variable(tf.zeros((2, 3)), trainable=False), tf.Variable(tf.zeros(3), trainable=False)]
CHANGES: dict[str, tuple[Change, bool]] = {
    "none": (lambda gradients, variables: gradients, False),
    "a factor": (lambda gradients, variables: [0.5 * one / 3.0 for one in gradients], False),
    "decay": (lambda gradients, variables: [g + 0.1 * v for g, v in zip(gradients, variables, strict=True)], False),
    "centre": (lambda gradients, variables: [one - tf.reduce_mean(one, 0, keepdims=True) for one in gradients], False),
    "into sums": (accumulating, False),
    "norm": (lambda gradients, variables: tf.clip_by_global_norm(gradients, 0.1)[0], True),
    "each norm": (lambda gradients, variables: [tf.clip_by_norm(one, 0.1) for one in gradients], True),
    "value": (lambda gradients, variables: [tf.clip_by_value(one, -0.1, 0.1) for one in gradients], True),
    "signs, and a factor": (lambda gradients, variables: [2.0 * tf.sign(one) for one in gradients], True),
    "as a divisor": (lambda gradients, variables: [1.0 / one for one in gradients], True),
    "into weights": (perturbing, True),
    "into a metric": (noting, True),
}


def step(uses: GradientUses, change: Change) -> Callable[[Any], None]:
    weights, offsets = keras.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), tf.Variable([1.0, 2.0, 3.0])

    def call(x: Any) -> None:
        with watching(uses):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weights.value + offsets))
            variables = [weights, offsets]
            uses.check(change(tape.gradient(loss, [weights.value, offsets]), variables))
            uses.check([])

    return call


@pytest.mark.parametrize("how", CHANGES)
def test_what_is_not_linear_is_told(how: str) -> None:
    change, bent = CHANGES[how]
    sentences: list[str] = []
    tf.function(step(GradientUses("it", sentences.append), change))(tf.ones((4, 2)))
    assert set(sentences) == ({told("it")} if bent else set())


@pytest.mark.parametrize("how", ["none", "value"])
def test_eagerly_what_is_another_tensor(how: str) -> None:
    change, bent = CHANGES[how]
    sentences: list[str] = []
    step(GradientUses("it", sentences.append), change)(tf.ones((4, 2)))
    assert sentences == ([told("it")] if bent else [])


def test_gradients_of_inputs_are_each_row_s() -> None:
    sentences: list[str] = []
    uses = GradientUses("it", sentences.append)

    @tf.function
    def penalty(x: Any) -> Any:
        with watching(uses), tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(x))
        found = tf.clip_by_value(tape.gradient(loss, x), 0.0, 1.0)
        uses.check([found])
        return found

    penalty(tf.ones((4, 2)))
    assert not sentences


@pytest.mark.parametrize(
    ("made", "adds"),
    [(lambda loss: loss, False), (lambda loss: 8.0 * loss, False), (lambda loss: loss + tf.reduce_sum(loss), True)],
)
def test_what_is_added_to_the_loss_of_keras_is_seen(made: Callable[[Any], Any], adds: bool) -> None:
    uses, weight = GradientUses("it", lambda text: None), tf.Variable(2.0)

    @tf.function
    def call() -> Any:
        with watching(uses), tf.GradientTape() as tape:
            loss = tf.square(weight)
            uses.losses.append(loss)
            target = made(loss)
        with watching(uses):
            return tape.gradient(target, weight)

    call()
    assert uses.adds_to_losses is adds
