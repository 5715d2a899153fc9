"""Are labels class numbers or quantities, and are they sound?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted

LARGEST = 2**53  # above it not every whole number is a float64

Task = Literal["auto", "classification", "regression"]
Array = NDArray[Any]


@dataclass(frozen=True)
class Labels:
    """Labels as they were understood."""

    values: Array  # int64 class numbers, shape (samples,); or float32 quantities, (samples,) or (samples, k)
    num_classes: int | None  # None for quantities
    class_names: tuple[str, ...] | None  # of classes that were given as text, by class number
    meaning: str  # for the user


def as_labels(
    values: Array,
    name: str,
    task: Task,
    num_classes: int | None,
    *,
    names: tuple[str, ...] | None = None,
    place: Callable[[int], str] = "sample {}".format,
) -> Labels:
    """Understand labels as class numbers or quantities.

    With task "auto", texts, integers and whole numbers are classes, rows of one 1 among 0s are too (one-hot), anything
    else is a regression. Texts are numbered in alphabetical order. Without `num_classes` there is one more than the
    largest label. `names` are those of the classes, where another part of the data has given them as text; messages
    call the data `name`, and a sample by its `place`.

    Raises:
        DataError: labels are no numbers, not finite, or no class numbers where such are wanted.
    """
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.dtype.kind in "US" and values.ndim == 1:
        texts = values if values.dtype.kind == "U" else np.char.decode(values, "utf-8", "replace")
        return _of_texts(texts, name, task, num_classes, names, place)
    if names is not None:
        raise DataError(f"{name}: labels are numbers, but those of the training samples are texts: make them alike")
    values = _numbers(values, name, place)
    if task == "regression" or (task == "auto" and num_classes is None and not _are_classes(values)):
        return Labels(values.astype(np.float32), None, None, "quantities")
    classes = class_numbers(values, name, place)
    num_classes = values.shape[1] if values.ndim == 2 and num_classes is None else num_classes
    count = count_classes(classes, name, num_classes, place)
    unused = np.setdiff1d(np.arange(count), classes)
    meaning = f"class numbers 0 to {count - 1}" + (f" (none of them {some(map(str, unused))})" if len(unused) else "")
    if task == "auto" and num_classes is None and values.ndim == 1:
        meaning += "; --task regression takes them as quantities"
    return Labels(classes, count, None, meaning)


def _of_texts(
    values: Array,
    name: str,
    task: Task,
    num_classes: int | None,
    names: tuple[str, ...] | None,
    place: Callable[[int], str],
) -> Labels:
    if task == "regression":
        raise DataError(
            f"{name}: labels are texts such as {str(values[0])!r}, no quantities: leave out --task regression"
        )
    found, codes = np.unique(values, return_inverse=True)
    if names is None:
        if len(found) * 2 > len(values) and len(found) > 2:
            raise DataError(
                f"{name}: {len(found)} different texts in {len(values)} labels are no classes: name another label, or "
                "give more samples a class"
            )
        names = tuple(found.tolist())
        if len(names) < 2:
            raise DataError(f"{name}: all labels are {names[0]!r}: give samples of at least two classes")
    unknown = [text for text in found.tolist() if text not in names]
    if unknown:
        first = int(np.argmax(values == unknown[0]))
        raise DataError(
            f"{name}: the label of {place(first)} is {unknown[0]!r}, a class that the training samples lack"
        )
    if num_classes not in (None, len(names)):
        raise DataError(
            f"{name}: the labels are of {counted(len(names), 'class')}, but --classes is {num_classes}: leave it out"
        )
    numbers = np.asarray([names.index(text) for text in found.tolist()], np.int64)[codes]
    return Labels(numbers, len(names), names, f"classes {some(names)}")


def some(names: Iterable[str], most: int = 8) -> str:
    """Local: the names, or the first of many."""
    whole = list(names)
    return ", ".join(whole[:most]) + (f" and {len(whole) - most} more" if len(whole) > most else "")


def class_numbers(values: Array, name: str, place: Callable[[int], str] = "sample {}".format) -> Array:
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
            f"{name}: the label of {place(int(wrong[0]))} is {values[wrong[0]]}, not a whole number: number the "
            "classes 0, 1, 2, ..., or ask for a regression"
        )
    huge = np.flatnonzero(np.abs(values) > LARGEST)
    if len(huge):
        raise DataError(
            f"{name}: the label of {place(int(huge[0]))} is {values[huge[0]]:g}: number the classes 0, 1, 2, ..., or "
            "ask for a regression"
        )
    classes = values.astype(np.int64)
    if len(classes) and classes.min() < 0:
        first = int(np.argmax(classes < 0))
        raise DataError(f"{name}: the label of {place(first)} is {classes[first]}: number the classes from 0")
    return classes


def count_classes(
    classes: Array, name: str, num_classes: int | None, place: Callable[[int], str] = "sample {}".format
) -> int:
    """How many classes there are.

    Raises:
        DataError: a label is beyond the number of classes, or these are none to tell apart.
    """
    largest = int(classes.max(initial=0))
    if num_classes is not None:
        if largest >= num_classes:
            raise DataError(
                f"{name}: the label of {place(int(np.argmax(classes)))} is {largest}, but there are {num_classes} "
                f"classes: labels must be 0 to {num_classes - 1}"
            )
        return num_classes
    if not len(classes):
        return 1
    present = len(np.unique(classes))
    # Numbers of which most do not occur are rather years, sizes or the like.
    if largest >= max(len(classes), 2) or 2 * present <= largest:
        raise DataError(
            f"{name}: labels go up to {largest}, but there are only {counted(present, 'class')} in "
            f"{counted(len(classes), 'sample')}: number the classes 0, 1, 2, ..., "
            "say how many there are with --classes, or ask for a regression with "
            "--task regression"
        )
    if present == 1:
        raise DataError(
            f"{name}: all labels are {largest}: give samples of at least two classes, or say with --classes how many "
            "there are"
        )
    return largest + 1


def _numbers(values: Array, name: str, place: Callable[[int], str]) -> Array:
    if values.dtype.kind not in "buif":
        raise DataError(f"{name}: labels are of type {values.dtype}, not numbers: number the classes 0, 1, 2, ...")
    if values.ndim not in (1, 2):
        raise DataError(f"{name}: labels have shape {values.shape}: give one label, or one row of numbers, a sample")
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32)).all(axis=tuple(range(1, values.ndim)))
    if not finite.all():
        wrong = int(np.argmin(finite))
        raise DataError(
            f"{name}: the label of {place(wrong)} is not a finite number (NaN, infinite, or beyond float32): mend or "
            "remove it"
        )
    return values


def _are_classes(values: Array) -> bool:
    return _one_hot(values) or (values.ndim == 1 and bool((values == np.floor(values)).all()))


def _one_hot(values: Array) -> bool:
    if values.ndim != 2 or values.shape[1] < 2:
        return False
    return bool((((values == 0) | (values == 1)).all(axis=1) & (values.sum(axis=1) == 1)).all())
