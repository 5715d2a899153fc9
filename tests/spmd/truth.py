"""The truth for training: N ranks with batches b do what one rank does with their concatenation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import mpitrain
from mpitrain.training.callbacks import DataParallel
from tests.problem import FEATURES as FEATURES
from tests.problem import Batch as Batch
from tests.problem import batches as batches
from tests.problem import dataset as dataset
from tests.problem import merged as merged
from tests.problem import mlp as mlp

WORLD = mpitrain.init()
# An older Keras gives nested numbers of a validation the names of those of the training.
FLAT_VALIDATION = "pythonify_logs" in inspect.getsource(keras.Model.evaluate)
ModelMaker = Callable[[], Any]


def fit(model: Any, pairs: list[Batch], distributed: bool, callbacks: Sequence[Any] = (), **options: Any) -> Any:
    """`fit`, data-parallel or plain; the history."""
    first = [DataParallel()] if distributed else []
    options = {"epochs": 2, **options}
    return model.fit(dataset(pairs), verbose=0, callbacks=[*first, *callbacks], **options).history


def check_same(model: Any, reference: Any, tolerance: float = 1e-12) -> None:
    """The replicas are identical, and equal to the reference."""
    mpitrain.verify_replicas(model.trainable_variables)
    for variable, expected in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(
            variable.numpy(), expected.numpy(), rtol=tolerance, atol=tolerance, err_msg=variable.path
        )


def check_history(history: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float) -> None:
    """All numbers are those of one rank, and the same bits on all ranks."""
    assert sorted(history) == sorted(expected)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
    numbers = [float(number) for name in sorted(history) for number in history[name]]
    assert mpitrain.all_gather_obj(numbers) == [numbers] * WORLD.size
