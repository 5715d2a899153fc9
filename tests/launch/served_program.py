"""On workers: `fit`, twice, by a parameter server, beside what one process makes of the same samples.

The last worker has less data than the others. The model has an embedding, whose gradients are rows.
"""

from __future__ import annotations

from typing import Any

import mpitrain

world = mpitrain.ParameterServer(servers=1).start()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from mpitrain.data.sharding import without_autotuning  # noqa: E402

WORDS = 40


def batches(worker: int) -> list[Any]:
    random = np.random.default_rng(worker)
    sizes = [3, 5, 2] if worker < world.size - 1 else [4, 3]
    return [(random.integers(0, WORDS, (n, 4)), random.normal(size=(n, 1)).astype("float32")) for n in sizes]


def dataset(pairs: list[Any]) -> Any:
    whole = tf.data.Dataset.from_tensors(pairs[0])
    for pair in pairs[1:]:
        whole = whole.concatenate(tf.data.Dataset.from_tensors(pair))
    return without_autotuning(whole)


def model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(WORDS, 3), keras.layers.Flatten()]
    made = keras.Sequential([*layers, keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return made


def train(pairs: list[Any], validation: list[Any], callbacks: list[Any]) -> tuple[list[Any], list[Any]]:
    trained = model()
    options = {"verbose": 0, "validation_data": dataset(validation), "callbacks": callbacks, "shuffle": False}
    histories = [trained.fit(dataset(pairs), epochs=2, **options).history for _ in range(2)]
    return trained.get_weights(), histories


everyone = [batches(worker) for worker in range(world.size)]
merged = [
    tuple(np.concatenate([own[step][part] for own in everyone if step < len(own)]) for part in (0, 1))
    for step in range(3)
]
own = everyone[world.rank]
found = train(own, own[:1], [mpitrain.callbacks.DataParallel()])
first = [tuple(np.concatenate([pairs[0][part] for pairs in everyone]) for part in (0, 1))]
expected = train(merged, first, [])
for value, reference in zip(found[0], expected[0], strict=True):
    np.testing.assert_allclose(value, reference, rtol=2e-5, atol=2e-5)
for history, wanted in zip(found[1], expected[1], strict=True):
    for name, numbers in wanted.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-4, err_msg=name)
mpitrain.verify_replicas([tf.Variable(value) for value in found[0]])
if world.is_root:
    print("the updates are those of one process", flush=True)
