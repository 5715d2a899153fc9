"""A small problem to train on, whose batches any rank can make: those of one rank, and those of all in one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.data.sharding import without_autotuning

FEATURES = 5
Batch = tuple[Any, Any]


def batches(rank: int, sizes: Sequence[int], seed: int = 7, dtype: str = "float64") -> list[Batch]:
    """The batches of one rank; any rank can make those of any other."""
    random = np.random.default_rng(seed + rank)
    return [(random.normal(size=(n, FEATURES)).astype(dtype), random.integers(0, 3, n)) for n in sizes]


def merged(ranks: Sequence[list[Batch]]) -> list[Batch]:
    """Batches of all ranks, step by step; ranks may have different numbers of them."""
    steps = max(len(own) for own in ranks)
    return [
        tuple(np.concatenate([own[step][part] for own in ranks if step < len(own)]) for part in (0, 1))  # type: ignore[misc]
        for step in range(steps)
    ]


def dataset(pairs: list[Batch]) -> tf.data.Dataset:
    """Batches of any size, of which Keras knows neither the number nor the size."""
    nothing = tuple(part[:0] for part in pairs[0])
    parts = map(tf.data.Dataset.from_tensors, [nothing, *pairs])
    whole = functools.reduce(lambda some, more: some.concatenate(more), parts)
    return without_autotuning(whole.filter(lambda x, y: tf.shape(x)[0] > 0))


def mlp(optimizer: Any, seed: int = 3, dtype: str = "float64", **compile_options: Any) -> Any:
    """A classifier with fixed initial weights, compiled."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,), dtype=dtype),
            keras.layers.Dense(4, activation="tanh", dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"jit_compile": False, "weighted_metrics": ["accuracy"], **compile_options}
    model.compile(optimizer, loss, **options)
    return model
