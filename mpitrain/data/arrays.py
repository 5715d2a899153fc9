"""Samples that lie in memory as numpy arrays, from a `.npz` file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mpitrain.data.labels import Task, as_labels
from mpitrain.data.source import DataSource, Samples, Share, assemble
from mpitrain.errors import DataError

Array = NDArray[Any]
BLOCK = 64
NAMES = "x and y, or x_train, y_train (and x_test, y_test)"


def array_samples(x: Array, y: Array) -> Samples:
    """Samples of two arrays of equal length; bytes stay bytes until they are read, scaled to [0, 1]."""
    with tf.device("CPU:0"):
        inputs, labels = tf.constant(x), tf.constant(y)

    def fetch(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.gather(inputs, positions)
        values = tf.cast(values, tf.float32) / 255.0 if values.dtype == tf.uint8 else values
        return values, tf.gather(labels, positions)

    # In blocks, because a call of `fetch` costs much more than a row does.
    return Samples(len(x), lambda positions: positions.batch(BLOCK).map(fetch).unbatch())


def as_inputs(values: Array, name: str) -> Array:
    """Inputs as uint8 (to be scaled later) or float32; grey images get a channel axis.

    Raises:
        DataError: inputs are no numbers or not finite.
    """
    if values.dtype.kind not in "buif":
        raise DataError(f"{name}: samples are of type {values.dtype}, not numbers: save them as uint8 or float32")
    if values.ndim == 0:
        raise DataError(f"{name}: the samples are a single number: the first axis must count the samples")
    if values.ndim == 1:
        values = values[:, np.newaxis]
    if values.dtype != np.uint8:
        values = values.astype(np.float32)
        for first in range(0, len(values), 1024):
            finite = np.isfinite(values[first : first + 1024].reshape(len(values[first : first + 1024]), -1)).all(
                axis=1
            )
            if not finite.all():
                raise DataError(
                    f"{name}: sample {first + int(np.argmin(finite))} has values that are not finite (NaN, "
                    "infinite, or beyond "
                    "float32): remove or mend it"
                )
    return values[..., np.newaxis] if values.ndim == 3 else values


def load_npz(path: Path, share: Share, task: Task, num_classes: int | None) -> DataSource:
    """Local: the samples and labels of a `.npz` file.

    Its arrays are called `x, y` or `x_train, y_train[, x_test, y_test]`. Other names do where there are
    exactly two arrays, and one of them has fewer axes or is alone in being of integers.

    Raises:
        DataError: the file cannot be used; the message says why.
    """
    arrays = _read(path)
    keys = _names(arrays, path)
    x, y = as_inputs(arrays[keys[0]], f"{path}, {keys[0]}"), arrays[keys[1]]
    _equally_many(x, y, keys, path)
    labels, classes = as_labels(y, f"{path}, {keys[1]}", task, num_classes)
    test = None
    if "x_test" in arrays and "y_test" in arrays:
        test_x = as_inputs(arrays["x_test"], f"{path}, x_test")
        _equally_many(test_x, arrays["y_test"], ("x_test", "y_test"), path)
        if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
            raise DataError(
                f"{path}: samples have shape {x.shape[1:]} and type {x.dtype} in {keys[0]}, but "
                f"{test_x.shape[1:]} and "
                f"{test_x.dtype} in x_test: make them equal"
            )
        test_task: Task = "regression" if classes is None else "classification"
        test_labels, _ = as_labels(arrays["y_test"], f"{path}, y_test", test_task, classes)
        if test_labels.shape[1:] != labels.shape[1:]:
            raise DataError(
                f"{path}: {keys[1]} has {labels.shape[1:]} numbers a sample, y_test "
                f"{test_labels.shape[1:]}: make them equal"
            )
        test = array_samples(test_x, test_labels)
    return assemble(array_samples(x, labels), share, test=test, num_classes=classes, description=str(path))


def _read(path: Path) -> dict[str, Array]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{path} holds a single array: save it with its labels, numpy.savez(file, x=..., y=...)")
        with file:
            return {name: file[name] for name in file}
    except DataError:
        raise
    except ValueError as error:
        if "Object arrays" in str(error):
            raise DataError(
                f"{path} holds Python objects, which are never unpickled: save plain numeric arrays, all "
                "samples of one shape"
            ) from error
        raise DataError(f"{path} cannot be read as .npz ({error}): save it again with numpy.savez") from error
    except Exception as error:  # a damaged archive: BadZipFile, zlib.error, EOFError, OSError, ...
        raise DataError(f"{path} cannot be read as .npz ({error}): save it again with numpy.savez") from error


def _names(arrays: Mapping[str, Array], path: Path) -> tuple[str, str]:
    for pair in (("x", "y"), ("x_train", "y_train")):
        if all(name in arrays for name in pair):
            return pair
    found = ", ".join(arrays) or "nothing"
    problem = DataError(f"{path} holds {found}: name its arrays {NAMES}")
    if len(arrays) != 2:
        raise problem
    first, second = arrays
    for x, y in ((first, second), (second, first)):
        if arrays[y].ndim == 1 and (
            arrays[x].ndim > 1 or (arrays[x].dtype.kind == "f" and arrays[y].dtype.kind in "iu")
        ):
            return x, y
    raise problem


def _equally_many(x: Array, y: Array, keys: tuple[str, str], path: Path) -> None:
    count = len(y) if y.ndim else 0
    if len(x) != count:
        raise DataError(
            f"{path}: {keys[0]} has {len(x)} samples, but {keys[1]} has {count} labels: give one label a sample"
        )
