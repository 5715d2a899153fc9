"""This rank's portion of what a script gives to Keras: arrays, data sets, `PyDataset`s and generators.

The script knows nothing of ranks. One global batch is what all ranks together take in a step:

- arrays: rank r takes rows r, r + size, ... of each global batch, so the steps of N ranks are those of one
  rank with the global batch;
- what comes in batches is dealt out batch by batch where batches are each rank's own, and row by row where
  they are global.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mpitrain.data.sharding import share_count
from mpitrain.errors import DataError


@dataclass(frozen=True)
class Portion:
    """Which part of a script's data this rank takes.

    Attributes:
        rank: of this process.
        size: number of ranks.
        batch_is_global: batches that the script names are those of all ranks together, not of each.
    """

    rank: int
    size: int
    batch_is_global: bool = False

    def batch_size(self, batch_size: int) -> int:
        """Local: rows of this rank in a full batch, of what the script asked for.

        Raises:
            DataError: a global batch has fewer rows than there are ranks.
        """
        if not self.batch_is_global:
            return batch_size
        if batch_size < self.size:
            raise DataError(
                f"a global batch of {batch_size} cannot be divided among {self.size} ranks: give a larger batch_size, "
                "fewer ranks, or --batch-size-is rank"
            )
        return share_count(batch_size, self.rank, self.size)

    def rows(self, count: int, batch_size: int) -> NDArray[np.int64]:
        """Local: positions of this rank's rows among `count`, batch after batch."""
        whole = batch_size if self.batch_is_global else batch_size * self.size
        starts = np.arange(0, count, whole, dtype=np.int64)[:, None]
        positions = (starts + np.arange(self.rank, whole, self.size, dtype=np.int64)).reshape(-1)
        return positions[positions < count]

    def rows_of_batch(self, data: Any) -> Any:
        """Local: this rank's rows of one batch, a nest of arrays or tensors."""
        return keras.tree.map_structure(self._every, data)

    def _every(self, leaf: Any) -> Any:
        return leaf[self.rank :: self.size] if len(getattr(leaf, "shape", ())) else leaf


def is_arrays(data: Any) -> bool:
    """Local: whether Keras takes `data` whole, with a first dimension that counts the samples."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return bool(leaves) and all(hasattr(leaf, "shape") and len(leaf.shape) > 0 for leaf in leaves)


def length(data: Any) -> int:
    """Local: the number of samples of arrays."""
    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    return int(first.shape[0])


def take(data: Any, rows: NDArray[np.int64] | slice) -> Any:
    """Local: those rows of a nest of arrays, tensors and pandas tables; None stays None."""
    return keras.tree.map_structure(lambda leaf: _take(leaf, rows), data)


def _take(leaf: Any, rows: NDArray[np.int64] | slice) -> Any:
    if leaf is None:
        return None
    if hasattr(leaf, "iloc"):
        return leaf.iloc[rows]
    if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.Variable) and not isinstance(rows, slice):
        return tf.gather(leaf, rows)
    return leaf[rows]


def count_of_batches(data: Any) -> int | None:
    """Local: the number of batches of an epoch, where it is known and finite."""
    if isinstance(data, tf.data.Dataset):
        count = int(data.cardinality())
        return count if count >= 0 else None
    return getattr(data, "num_batches", None)


def suited(portion: Portion, data: Any, evaluating: bool) -> Portion:
    """Local: `portion`, or one by rows of each batch where dealing out whole batches would leave a rank without any.

    Args:
        portion: as the script asks for.
        data: what comes in batches.
        evaluating: how it is divided does not change the result.
    """
    count = count_of_batches(data)
    too_few = count is not None and count < portion.size
    if too_few or (evaluating and count is None and isinstance(data, tf.data.Dataset)):
        return replace(portion, batch_is_global=True)
    return portion


def of_batches(data: Any, portion: Portion) -> Any:
    """Local: the portion of a `tf.data.Dataset`, a `PyDataset` or a generator whose elements are batches.

    Raises:
        DataError: it is something else.
    """
    if isinstance(data, tf.data.Dataset):
        return _rows_of_dataset(data, portion) if portion.batch_is_global else data.shard(portion.size, portion.rank)
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetPortion(data, portion)
    if hasattr(data, "__next__") or hasattr(data, "__iter__"):
        return _generated(data, portion)
    raise DataError(
        f"data of type {type(data).__name__} cannot be divided among ranks: give arrays, a tf.data.Dataset, "
        "a keras.utils.PyDataset or a generator"
    )


def _rows_of_dataset(dataset: tf.data.Dataset, portion: Portion) -> tf.data.Dataset:
    def own(*batch: Any) -> Any:
        return tf.nest.map_structure(
            lambda leaf: leaf[portion.rank :: portion.size], batch if len(batch) > 1 else batch[0]
        )

    def filled(*batch: Any) -> Any:
        return tf.shape(tf.nest.flatten(batch)[0])[0] > 0

    # The last batch may have fewer rows than there are ranks.
    return dataset.map(own).filter(filled)


def _generated(batches: Any, portion: Portion) -> Iterator[Any]:
    if not portion.batch_is_global:
        yield from islice(batches, portion.rank, None, portion.size)
        return
    for batch in batches:
        own = portion.rows_of_batch(batch)
        if length(own):
            yield own


class PyDatasetPortion(keras.utils.PyDataset):
    """This rank's batches, or its rows of each batch, of another `PyDataset`.

    Args:
        whole: what the script made.
        portion: which part of it.
    """

    def __init__(self, whole: Any, portion: Portion) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        self.whole, self.portion = whole, portion

    def __getitem__(self, index: int) -> Any:
        """Local: batch `index` of this rank.

        Raises:
            DataError: a batch has fewer rows than there are ranks.
        """
        if not self.portion.batch_is_global:
            return self.whole[index * self.portion.size + self.portion.rank]
        own = self.portion.rows_of_batch(self.whole[index])
        if not length(own):
            raise DataError(
                f"batch {index} has fewer rows than the {self.portion.size} ranks: leave it out, "
                "or --batch-size-is rank"
            )
        return own

    @property
    def num_batches(self) -> int | None:
        """Local: this rank's batches of an epoch; None where the script's number is unknown."""
        count: int | None = self.whole.num_batches
        if count is None or self.portion.batch_is_global:
            return count
        return share_count(count, self.portion.rank, self.portion.size)

    def on_epoch_begin(self) -> None:
        """Local: as the script's own."""
        self.whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Local: as the script's own."""
        self.whole.on_epoch_end()
