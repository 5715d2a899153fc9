"""What Keras makes of a script's data, divided among the ranks.

Keras itself reads the data, in the order and the number of batches of one process, and refuses what it does not take;
what is divided is what comes out. Keras' adapters are what `fit` and `evaluate` take instead of data.
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from mpitrain.collectives.ordering import host_call
from mpitrain.data.portions import Portion, Share, rows_of_parts
from mpitrain.data.sharding import share_count
from mpitrain.errors import AgreedError
from mpitrain.runtime import keras_private
from mpitrain.runtime.keras_private import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
)

# Each rank takes its rows of each batch, every Nth batch, or computes each whole batch.
Way = Literal["rows", "batches", "whole"]


def adapter_of(**arguments: Any) -> DataAdapter:
    """Local: what Keras reads the data with.

    Args:
        arguments: those of `fit` and `evaluate` that concern data; `steps_per_epoch` among them.

    Raises:
        AgreedError: on all ranks: nobody can divide it.
        Exception: Keras does not take it.
    """
    adapter = keras_private.get_data_adapter(**arguments)
    readable = isinstance(adapter, ArrayDataAdapter | PyDatasetAdapter | GeneratorDataAdapter | TFDatasetAdapter)
    dataset = adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
    if not readable or not isinstance(dataset, tf.data.Dataset | None):
        raise AgreedError(
            f"data of type {type(arguments['x']).__name__} cannot be divided among ranks: give arrays, a "
            "tf.data.Dataset, a keras.utils.PyDataset or a generator"
        )
    return adapter


class DividedAdapter(DataAdapter):
    """One rank's part of what Keras reads with another adapter."""

    def __init__(self, whole: DataAdapter, portion: Portion, way: Way) -> None:
        self._portion, self._way, self._dealt = portion, way, way == "batches"
        if self._dealt and isinstance(whole, PyDatasetAdapter):
            whole, self._dealt = _DealtPyDataset(whole, portion), False
        self._whole = whole

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Local: this rank's batches, or its `Share` of each."""
        if isinstance(self._whole, ArrayDataAdapter):
            return self._of_arrays(self._whole)
        dataset = self._whole.get_tf_dataset()
        if self._way == "batches":
            return dataset.shard(self._portion.size, self._portion.rank) if self._dealt else dataset
        unpacks = type(dataset.element_spec) is tuple
        return dataset.map(lambda *batch: self._share(batch if unpacks else batch[0]))

    def _share(self, batch: Any, enough: bool = False) -> Share:
        whole = self._way == "whole"
        if self._portion.rank == 0 and not (whole or enough):
            batch = tell_of_parts(batch)
        return self._portion.share(batch, enough=enough, whole=whole)

    def _of_arrays(self, whole: ArrayDataAdapter) -> tf.data.Dataset:
        """Local: Keras' order of all samples, of which only this rank's rows are read."""
        size, last = whole.batch_size, whole.partial_batch_size or whole.batch_size
        inputs, count, shuffle = keras_private.arrays_of(whole)
        # Keras' own shuffle, of places in place of samples: the order is that of one process, and no other rank's rows
        # are read.
        order = ArrayDataAdapter(np.arange(count), batch_size=size, shuffle=shuffle)
        positions = order.get_tf_dataset()
        if self._way == "batches":
            positions = positions.shard(self._portion.size, self._portion.rank)
        else:
            enough = min(size, last) >= self._portion.size and self._way == "rows"
            positions = positions.map(lambda batch: self._share(batch, enough))
        arrays = keras_private.sliceable(inputs, target_backend="tensorflow")
        # As Keras' adapter has it: the arrays are one element, which every batch refers to.
        arrays = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays)).repeat()

        def gathered(positions: Any, arrays: Any) -> Any:
            if isinstance(positions, Share):
                return positions._replace(data=_gather(arrays, positions.data))
            return _gather(arrays, positions)

        batches = tf.data.Dataset.zip(positions, arrays).map(gathered, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE)

    @property
    def num_batches(self) -> int | None:
        """Local: this rank's batches of an epoch; None where Keras cannot tell."""
        count: int | None = self._whole.num_batches
        if count is None or not self._dealt:
            return count
        return share_count(count, self._portion.rank, self._portion.size)

    def on_epoch_begin(self) -> None:
        """Local: as the script's own."""
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Local: as the script's own."""
        self._whole.on_epoch_end()


def tell_of_parts(batch: Any) -> Any:
    """Local: the batch; where its parts have different numbers of rows, it is said once.

    Args:
        batch: as it will be divided; in a graph it is said when that runs.
    """
    counts = rows_of_parts(batch)
    if all(isinstance(count, int) for count in counts):
        if len(set(counts)) > 1:
            _say_unlike()
        return batch

    def say() -> np.int32:
        _say_unlike()
        return np.int32(0)

    unlike = tf.reduce_any(tf.not_equal(counts, counts[0]))
    said = tf.cond(unlike, lambda: host_call(say, [], [tf.int32])[0], lambda: tf.constant(0))
    with tf.control_dependencies([said]):
        return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, batch)


@functools.cache
def _say_unlike() -> None:
    """Local, by rank 0: that there is nothing to gain."""
    sys.stderr.write(
        "mpitrain: the parts of a batch have different numbers of rows, so it is not known which rows of them belong "
        "together: every rank computes all of such batches: with the numbers of one rank, and no faster\n"
    )


def _gather(arrays: Any, positions: tf.Tensor) -> Any:
    """Local: those rows of what Keras has made of arrays for TensorFlow; None stays None."""

    def rows(leaf: Any) -> Any:
        if isinstance(leaf, keras_private.SparseRows):
            return keras_private.take_sparse_rows(leaf, positions)
        return tf.gather(leaf, positions) if tf.is_tensor(leaf) else None  # None: Keras goes on with what it holds

    return keras.tree.traverse(rows, arrays)


class _DealtPyDataset(keras_private.PyDatasetPasses):
    """Makes every Nth batch of a `PyDataset`, and no other. All ranks draw the same order, that of one process."""

    def __init__(self, whole: PyDatasetAdapter, portion: Portion) -> None:
        self._shuffled = whole.shuffle
        super().__init__(_Dealt(whole.py_dataset, portion), class_weight=whole.class_weight)

    def begin_pass(self) -> None:
        """Local: in the order of one process."""
        self.py_dataset.begin(self._shuffled)


class _Dealt(keras.utils.PyDataset):
    def __init__(self, whole: Any, portion: Portion) -> None:
        super().__init__(
            workers=whole.workers, use_multiprocessing=whole.use_multiprocessing, max_queue_size=whole.max_queue_size
        )
        self._whole, self._portion = whole, portion
        self._order: list[int] | None = None

    def begin(self, shuffled: bool) -> None:
        count = self._whole.num_batches
        self._order = None if count is None else list(range(count))
        if shuffled and self._order is not None:
            random.shuffle(self._order)

    def __getitem__(self, index: int) -> Any:
        position = index * self._portion.size + self._portion.rank
        return self._whole[position if self._order is None else self._order[position]]

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._whole.num_batches
        return None if count is None else share_count(count, self._portion.rank, self._portion.size)

    def on_epoch_begin(self) -> None:
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._whole.on_epoch_end()
