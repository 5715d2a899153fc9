"""Are labels class numbers or quantities, and are they sound?"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpitrain.errors import DataError

Task = Literal["auto", "classification", "regression"]
Array = NDArray[Any]


def as_labels(values: Array, name: str, task: Task, num_classes: int | None) -> tuple[Array, int | None]:
    """Give labels as (int64 class numbers, number of classes) or (float32 quantities, None).

    With task "auto", integers and whole numbers are classes, rows of one 1 among 0s are too (one-hot),
    anything else is a regression.

    Args:
        values: one label a sample, shape (samples,) or (samples, k).
        name: what to call the data in an error message.
        task: what the labels are.
        num_classes: how many classes there are, where the user said so; else one more than the largest label.

    Raises:
        DataError: labels are no numbers, not finite, or no class numbers where such are wanted.
    """
    values = _numbers(values, name)
    if task == "regression" or (task == "auto" and num_classes is None and not _are_classes(values)):
        return values.astype(np.float32), None
    classes = class_numbers(values, name)
    return classes, count_classes(classes, name, num_classes)


def class_numbers(values: Array, name: str) -> Array:
    """Labels as int64 class numbers.

    Raises:
        DataError: a label is not a whole number of at least 0.
    """
    if _one_hot(values):
        return np.asarray(values.argmax(axis=1), np.int64)
    if values.ndim != 1:
        raise DataError(f"{name}: labels have shape {values.shape}: give one class number a sample, or one-hot rows")
    wrong = np.flatnonzero(values != np.floor(values))
    if len(wrong):
        raise DataError(
            f"{name}: the label of sample {wrong[0]} is {values[wrong[0]]}, not a whole number: number the "
            "classes 0, 1, 2, ..., "
            "or ask for a regression"
        )
    classes = values.astype(np.int64)
    if len(classes) and classes.min() < 0:
        first = int(np.argmax(classes < 0))
        raise DataError(f"{name}: the label of sample {first} is {classes[first]}: number the classes from 0")
    return classes


def count_classes(classes: Array, name: str, num_classes: int | None) -> int:
    """How many classes there are.

    Raises:
        DataError: a label is beyond the number of classes, or of samples.
    """
    largest = int(classes.max(initial=0))
    if num_classes is not None and largest >= num_classes:
        first = int(np.argmax(classes))
        raise DataError(
            f"{name}: the label of sample {first} is {largest}, but there are {num_classes} classes: "
            "labels must be 0 to "
            f"{num_classes - 1}"
        )
    if num_classes is None and largest >= max(len(classes), 2):
        raise DataError(
            f"{name}: labels go up to {largest}, but there are only {len(classes)} samples: number the "
            "classes 0, 1, 2, ..., "
            "or ask for a regression"
        )
    return largest + 1 if num_classes is None else num_classes


def _numbers(values: Array, name: str) -> Array:
    if values.dtype.kind not in "buif":
        raise DataError(f"{name}: labels are of type {values.dtype}, not numbers: number the classes 0, 1, 2, ...")
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim not in (1, 2):
        raise DataError(f"{name}: labels have shape {values.shape}: give one label, or one row of numbers, a sample")
    finite = np.isfinite(values) if values.ndim == 1 else np.isfinite(values).all(axis=1)
    if not finite.all():
        wrong = int(np.argmin(finite))
        raise DataError(f"{name}: the label of sample {wrong} is not a finite number: mend or remove it")
    return values


def _are_classes(values: Array) -> bool:
    return _one_hot(values) or (values.ndim == 1 and bool((values == np.floor(values)).all()))


def _one_hot(values: Array) -> bool:
    if values.ndim != 2 or values.shape[1] < 2:
        return False
    return bool((((values == 0) | (values == 1)).all(axis=1) & (values.sum(axis=1) == 1)).all())
