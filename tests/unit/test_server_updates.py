"""Parameter servers make the updates that one process makes of the same gradients."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.comm.world import World
from mpitrain.training.exchange import exchange_of, sample_count
from mpitrain.training.optimizer import DistributedOptimizer, hook_of
from tests.unit.served_job import gradients_of, run, samples_of

SHAPES: list[tuple[int, ...]] = [(6, 3), (3,), (40, 2), ()]
STEPS = 3


def variables() -> list[Any]:
    random = np.random.default_rng(5)
    found = []
    for number, shape in enumerate(SHAPES):
        with keras.name_scope(f"layer_{number}"):
            found.append(keras.Variable(random.normal(size=shape), dtype="float64", name="kernel"))
    return found


def optimizer_of(name: str, **options: Any) -> Any:
    options = {"learning_rate": 0.05, **options}
    made = getattr(keras.optimizers, name)(**options)
    if made.weight_decay:
        made.exclude_from_weight_decay(var_names=["nothing"])
    return made


def expected(name: str, options: dict[str, Any], workers: int) -> tuple[list[Any], list[Any]]:
    """What one process makes of the mean gradients: variables, and the optimizer's own."""
    kept, optimizer = variables(), optimizer_of(name, **options)
    for step in range(STEPS):
        weights = np.array([samples_of(worker, step) for worker in range(workers)], np.float64)
        everyone = [gradients_of(worker, step, SHAPES) for worker in range(workers)]
        means = [np.tensordot(weights / weights.sum(), np.stack(column), 1) for column in zip(*everyone, strict=True)]
        optimizer.apply([tf.constant(mean) for mean in means], kept)
    return [v.numpy() for v in kept], [np.asarray(v.numpy()) for v in optimizer.variables]


def train(world: World, name: str, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    kept = variables()
    if not world.is_root:  # the first worker's values are taken
        kept[0].assign(kept[0] * 1.0)
    optimizer = DistributedOptimizer(optimizer_of(name, **options), world=world)

    def step(number: Any, *gradients: Any) -> None:
        with sample_count(number):
            optimizer.apply(list(gradients), kept)

    for number in range(STEPS):
        own = [tf.constant(gradient) for gradient in gradients_of(world.rank, number, SHAPES)]
        step(tf.constant(float(samples_of(world.rank, number)), tf.float64), *own)
    exchange_of(world).join()
    hook_of(optimizer).fetch_state()
    return [v.numpy() for v in kept], [np.asarray(v.numpy()) for v in optimizer.variables]


def check(found: Any, name: str, options: dict[str, Any], workers: int) -> None:
    for mine, reference in zip(found, expected(name, options, workers), strict=True):
        for one, other in zip(mine, reference, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-7, atol=2e-7)


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
