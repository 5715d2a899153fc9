"""Samples from a function of the user's that returns a `tf.data.Dataset`, named `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.data.labels import Array, Task, as_labels
from mpitrain.data.sharding import EpochSeeds, Indices, hold_out, known_count, shard, share_count, shuffled
from mpitrain.data.source import DataSource, Meaning, Preprocessing, Share, enough_for_all_ranks
from mpitrain.errors import DataError, UsageError, in_one_line, own_lines

SHUFFLE_BUFFER = 10_000
COMPARED = 32


def resolve(spec: str, error: type[UsageError]) -> Callable[..., Any]:
    """Local: import `package.module:function`; the working directory is searched as well.

    Raises:
        error: there is no such module or function, or the import failed.
    """
    module_name, _, name = spec.partition(":")
    # `python -m` has it there; the command `mpitrain` has the folder that it is installed in.
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as failure:  # whatever the user's module raises
        raise error(
            f"module {module_name!r} cannot be imported ({_said(failure)}): check its name and its imports"
            f"{_where(failure)}"
        ) from failure
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise error(f"module {module_name!r} has no function {name!r}: correct the name after the colon")
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., Any], spec: str, error: type[UsageError], **arguments: Any) -> Any:
    """Local: call a function of the user's.

    Raises:
        error: the function raised something; its exception is the cause of this one.
    """
    try:
        return function(**arguments)
    except Exception as failure:
        raise error(f"{spec} failed ({_said(failure)}){_where(failure)}") from failure


def load_function(spec: str, share: Share, task: Task, num_classes: int | None) -> DataSource:
    """Local: the dataset that a function returns, see `load_dataset`.

    Raises:
        DataError: the function does not exist, fails, or returns anything else.
    """
    dataset = call(resolve(spec, DataError), spec, DataError)
    return load_dataset(dataset, spec, share, task, num_classes)


def load_dataset(dataset: Any, spec: str, share: Share, task: Task, num_classes: int | None) -> DataSource:
    """Local: a dataset of single (x, y), in the same order each time.

    It is read through once before, to count samples and classes; do not shuffle, batch or repeat it: training does.
    `spec` is what it is called in messages.

    Raises:
        DataError: the dataset is another.
    """
    _check_elements(dataset, spec)
    labels = as_labels(_labels(dataset, spec), spec, task, num_classes)
    x, _ = dataset.element_spec
    inputs = f"{'x'.join(map(str, x.shape.as_list())) or '1'} {x.dtype.name}"
    scale = 255.0 if x.dtype == tf.uint8 else 65535.0 if x.dtype == tf.uint16 else 1.0
    meaning = Meaning(inputs, labels.meaning, None, Preprocessing(scale))
    return _Counted(dataset.enumerate(), labels.values, labels.num_classes, spec, meaning).source(share)


@dataclass(frozen=True)
class _Counted:
    """A dataset whose samples are known by number."""

    numbered: tf.data.Dataset  # pairs of a number and (x, y)
    labels: Array  # of all samples
    classes: int | None  # how many; None for a regression
    spec: str  # for messages
    meaning: Meaning  # of the samples

    def source(self, share: Share) -> DataSource:
        """Local: the share of one rank."""
        kept, held = hold_out(len(self.labels), share.validation_split, share.seed)
        enough_for_all_ranks(len(kept), share, self.spec)
        training = self._part(held, False)

        def mine(elements: tf.data.Dataset, count: int) -> tf.data.Dataset:
            return known_count(shard(elements, share.rank, share.size), share_count(count, share.rank, share.size))

        def in_order(epochs: EpochSeeds, done: int = 0) -> tf.data.Dataset:
            # Before it is dealt out, and by the same seeds on all ranks: so each sample is one rank's.
            elements = shuffled(training, min(len(kept), SHUFFLE_BUFFER), epochs)
            return mine(elements.skip(done), len(kept) - done)

        epochs = EpochSeeds(share.seed)
        return DataSource(
            train=in_order(epochs),
            validation=mine(self._part(held, True), len(held)) if len(held) else None,
            test=None,
            train_count=len(kept),
            validation_count=len(held),
            test_count=0,
            num_classes=self.classes,
            description=self.spec,
            epochs=epochs,
            rest=lambda epoch, done: in_order(EpochSeeds(share.seed, epoch), done),
            deal=lambda rank, size: self.source(replace(share, rank=rank, size=size)),
            meaning=self.meaning,
        )

    def _part(self, held: Indices, wanted: bool) -> tf.data.Dataset:
        """Local: the samples that are held out, or the others."""
        with tf.device("CPU:0"):
            constant = tf.constant(self.labels)
            held_out = tf.constant(np.isin(np.arange(len(self.labels)), held))
        return self.numbered.filter(lambda position, _: tf.equal(tf.gather(held_out, position), wanted)).map(
            lambda position, element: (_as_input(element[0]), tf.gather(constant, position))
        )


def _said(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {in_one_line(failure)}"


def _where(failure: BaseException) -> str:
    """Where in the user's code, where it was that."""
    lines = own_lines(failure)
    return f"\n{lines}" if "  File " in lines else ""


def _as_input(value: tf.Tensor) -> tf.Tensor:
    value = tf.cast(value, tf.float32)
    return value[..., tf.newaxis] if value.shape.rank == 2 else value


def _check_elements(dataset: Any, spec: str) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise DataError(f"{spec} returns a {type(dataset).__name__}: return a tf.data.Dataset of (x, y)")
    elements = dataset.element_spec
    pair = (
        isinstance(elements, tuple) and len(elements) == 2 and all(isinstance(part, tf.TensorSpec) for part in elements)
    )
    if not pair:
        raise DataError(f"{spec} returns a dataset whose elements are not pairs of tensors: return elements (x, y)")
    x, y = elements
    if not all(part.dtype.is_floating or part.dtype.is_integer or part.dtype.is_bool for part in elements):
        raise DataError(f"{spec} returns elements of {x.dtype.name} and {y.dtype.name}: x and y must be numbers")
    if x.shape.rank is None or y.shape.rank is None:
        raise DataError(f"{spec} returns elements of unknown shape: fix it with tf.ensure_shape in the function")
    if y.shape.rank > 1 or (
        y.shape.rank == 1 and (y.shape[0] is None or (y.dtype.is_integer and x.shape[:1] == y.shape))
    ):
        raise DataError(
            f"{spec} returns batches, x of shape {x.shape} and y of shape {y.shape}: return single samples "
            "(no .batch())"
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError(f"{spec} returns a dataset without end: leave out .repeat(), or end it with .take(n)")


def _labels(dataset: tf.data.Dataset, spec: str) -> Array:
    """All labels, from one pass over the data; a second look at some shows whether the order is steady."""
    labels = dataset.map(lambda x, y: (y, tf.reduce_all(tf.math.is_finite(tf.cast(x, tf.float32)))))
    try:
        found = list(labels.as_numpy_iterator())
        again = [label for label, _ in islice(labels.as_numpy_iterator(), COMPARED)]
    except tf.errors.OpError as error:
        raise DataError(
            f"{spec}: its dataset cannot be read ({_said(error)}): iterate over it alone in Python to see where"
        ) from error
    damaged = next((position for position, (_, finite) in enumerate(found) if not finite), None)
    if damaged is not None:
        raise DataError(f"{spec}: sample {damaged} has values that are not finite: remove or mend it")
    if any(not np.array_equal(first, second, equal_nan=True) for (first, _), second in zip(found, again, strict=False)):
        raise DataError(
            f"{spec} gives its samples in another order each time: leave out .shuffle(), training shuffles them"
        )
    return np.asarray([label for label, _ in found])
