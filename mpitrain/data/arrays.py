"""Samples that lie in memory as numpy arrays, perhaps from a `.npz` file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mpitrain.data.labels import Labels, Task, as_labels, some
from mpitrain.data.source import DataSource, Meaning, Preprocessing, Samples, Share, assemble
from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted

Array = NDArray[Any]
BLOCK = 64
NAMES = "x and y, or x_train, y_train (and x_val, y_val, x_test, y_test)"
# By which names arrays go, in lower case and without the part they belong to.
INPUTS = ("x", "images", "image", "features", "data", "inputs", "samples")
LABELS = ("y", "labels", "label", "targets", "target", "classes", "class")
PARTS = {"train": "train", "training": "train", "val": "validation", "valid": "validation", "validation": "validation"}
PARTS |= {"dev": "validation", "test": "test", "testing": "test"}
BITS = 16  # integers beyond are no grey values


def array_samples(x: Array, y: Array) -> Samples:
    """Samples of two arrays of equal length; as float32 when they are read, not before."""
    with tf.device("CPU:0"):
        inputs, labels = tf.constant(x), tf.constant(y)

    def fetch(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(tf.gather(inputs, positions), tf.float32), tf.gather(labels, positions)

    # In blocks, because a call of `fetch` costs much more than a row does.
    return Samples(len(x), lambda positions: positions.batch(BLOCK).map(fetch).unbatch())


def as_inputs(values: Array, name: str) -> Array:
    """Inputs as uint8, uint16 or float32, with the same values; grey images get a channel axis.

    Raises:
        DataError: inputs are no numbers, not finite, or images with the channels first.
    """
    if values.dtype.kind not in "buif":
        raise DataError(f"{name}: samples are of type {values.dtype}, not numbers: save them as uint8 or float32")
    if values.ndim == 0:
        raise DataError(f"{name}: the samples are a single number: the first axis must count the samples")
    if values.ndim == 1:
        values = values[:, np.newaxis]
    if values.ndim == 4 and values.shape[1] in (1, 3, 4) and min(values.shape[2:]) > 4:
        raise DataError(
            f"{name}: samples have shape {values.shape[1:]}, images with the channels first: put them last, with "
            "numpy.moveaxis(x, 1, -1)"
        )
    if values.dtype.kind == "u" and values.dtype.itemsize <= 2:
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
    else:
        # Beyond float32 is infinite, and told of below.
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        wrong = first_not_finite(values)
        if wrong is not None:
            raise DataError(
                f"{name}: sample {wrong} has values that are not finite (NaN, infinite, or beyond float32): remove or "
                "mend it"
            )
    return values[..., np.newaxis] if values.ndim == 3 else values


def first_not_finite(values: Array) -> int | None:
    """Local: the first row of float32 values with NaN or an infinity; None for none."""
    # In blocks: of all at once the answer would take a quarter of the memory of the values again.
    for first in range(0, len(values), 1024):
        finite = np.isfinite(values[first : first + 1024].reshape(len(values[first : first + 1024]), -1)).all(axis=1)
        if not finite.all():
            return first + int(np.argmin(finite))
    return None


def scale_of(values: Array) -> float:
    """Local: what to divide grey values by, so that they lie in [0, 1]; 1 for what are no grey values.

    Unsigned integers of 8 and 16 bits are, and any integers of images. They go up to 255, or where one is larger to
    the next 2^n - 1, since 10, 12 or 14 bits are stored in 16.
    """
    grey = values.dtype in (np.uint8, np.uint16) or (values.dtype.kind in "iu" and values.ndim >= 3)
    largest = int(values.max(initial=0)) if grey else 0
    if largest <= 1 or values.min(initial=0) < 0 or largest.bit_length() > BITS:
        return 1.0
    return float(2 ** max(8, largest.bit_length()) - 1)


def load_npz(path: Path, share: Share, task: Task, num_classes: int | None) -> DataSource:
    """Local: the samples and labels of a `.npz` file.

    Its arrays are called `x, y` or `x_train, y_train[, x_val, y_val][, x_test, y_test]`, or by other usual names.
    Any names do where there are exactly two arrays, and one of them has fewer axes or is alone in being of integers.

    Raises:
        DataError: the file cannot be used; the message says why.
    """
    return load_arrays(_read(path), path, share, task, num_classes)


def load_arrays(
    arrays: Mapping[str, Array], path: Path | str, share: Share, task: Task, num_classes: int | None
) -> DataSource:
    """Local: the samples and labels among arrays that are named as in `load_npz`.

    Raises:
        DataError: they cannot be used; the message says why.
    """
    pairs = _pairs(arrays, path)
    x_name, y_name = pairs["train"]
    x, labels = _part(arrays, pairs["train"], path, task, num_classes)
    parts: dict[str, Samples | None] = {"validation": None, "test": None}
    for part in set(pairs) - {"train"}:
        parts[part] = _other_part(arrays, pairs[part], path, pairs["train"], x, labels)
    unused = [name for name in arrays if not any(name in names for names in pairs.values())]
    inputs = f"{x_name}, {described(arrays[x_name])}" + (f"; not used: {some(unused)}" if unused else "")
    return assemble(
        array_samples(x, labels.values),
        share,
        **parts,
        num_classes=labels.num_classes,
        description=str(path),
        meaning=Meaning(
            inputs, f"{y_name}, {labels.meaning}", labels.class_names, Preprocessing(scale_of(arrays[x_name]))
        ),
    )


def described(values: Array) -> str:
    """Local: shape and type of one sample, and between what all their values lie."""
    shape = "x".join(map(str, values.shape[1:])) or "1"
    between = f", from {values.min():g} to {values.max():g}" if values.size and values.dtype.kind != "b" else ""
    return f"{shape} {values.dtype.name}{between}"


def _part(
    arrays: Mapping[str, Array],
    names: tuple[str, str],
    path: Path | str,
    task: Task,
    num_classes: int | None,
    class_names: tuple[str, ...] | None = None,
) -> tuple[Array, Labels]:
    """Samples and labels of one part, of equal length."""
    x, y = as_inputs(arrays[names[0]], f"{path}, {names[0]}"), arrays[names[1]]
    count = len(y) if y.ndim else 0
    if len(x) != count:
        raise DataError(
            f"{path}: {names[0]} has {counted(len(x), 'sample')}, but {names[1]} has "
            f"{counted(count, 'label')}: give one label a sample"
        )
    return x, as_labels(y, f"{path}, {names[1]}", task, num_classes, names=class_names)


def _other_part(
    arrays: Mapping[str, Array],
    names: tuple[str, str],
    path: Path | str,
    of_training: tuple[str, str],
    train_x: Array,
    train: Labels,
) -> Samples:
    """Validation or test samples, which are like those to train on."""
    task: Task = "regression" if train.num_classes is None else "classification"
    x, labels = _part(arrays, names, path, task, train.num_classes, train.class_names)
    for name, expected, found in zip(
        zip(of_training, names, strict=True), (train_x, train.values), (x, labels.values), strict=True
    ):
        if expected.shape[1:] != found.shape[1:] or expected.dtype != found.dtype:
            raise DataError(
                f"{path}: shape and type are {expected.shape[1:]} and {expected.dtype} in {name[0]}, but "
                f"{found.shape[1:]} and {found.dtype} in {name[1]}: make them equal"
            )
    return array_samples(x, labels.values)


def _read(path: Path) -> dict[str, Array]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{path} holds a single array: save it with its labels, numpy.savez(file, x=..., y=...)")
        with file:
            return {name: _array(file, name, path) for name in file}
    except DataError:
        raise
    except Exception as error:  # a damaged archive: BadZipFile, zlib.error, EOFError, OSError, ...
        raise DataError(f"{path} cannot be read as .npz ({error}): save it again with numpy.savez") from error


def _array(file: Any, name: str, path: Path) -> Array:
    try:
        found: Array = file[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise DataError(
            f"{path}: {name} holds Python objects, which are never unpickled: save plain numeric arrays, all samples "
            "of one shape"
        ) from error
    return found


def _pairs(arrays: Mapping[str, Array], path: Path | str) -> dict[str, tuple[str, str]]:
    """For train, and validation and test where they are there: the names of samples and labels."""
    found: dict[tuple[str, str], str] = {}
    for name in arrays:
        words = re.split(r"[_\-. ]+", name.lower())
        part = next((PARTS[word] for word in words if word in PARTS), "train")
        rest = "_".join(word for word in words if word not in PARTS)
        role = "x" if rest in INPUTS else "y" if rest in LABELS else ""
        if role and (part, role) in found:
            raise DataError(f"{path} holds {found[part, role]} and {name}, of which either may be meant: leave one out")
        if role:
            found[part, role] = name
    if ("train", "x") not in found or ("train", "y") not in found:
        return {"train": _names_by_shape(arrays, path)}
    for part, role in found:
        if (part, "y" if role == "x" else "x") not in found:
            missing = "labels" if role == "x" else "samples"
            raise DataError(
                f"{path} holds {found[part, role]} without the {missing} that belong to it: name both {NAMES}"
            )
    return {part: (found[part, "x"], found[part, "y"]) for part, role in found if role == "x"}


def _names_by_shape(arrays: Mapping[str, Array], path: Path | str) -> tuple[str, str]:
    problem = DataError(f"{path} holds {', '.join(arrays) or 'nothing'}: name its arrays {NAMES}")
    if len(arrays) != 2:
        raise problem
    first, second = arrays
    for x, y in ((first, second), (second, first)):
        if arrays[y].ndim == 1 and (
            arrays[x].ndim > 1 or (arrays[x].dtype.kind == "f" and arrays[y].dtype.kind in "iu")
        ):
            return x, y
    raise problem
