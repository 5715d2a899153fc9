"""This rank's portion of a batch: its rows.

The script knows nothing of ranks. One global batch is what all ranks together take in a step, and rank r takes its
rows r, r + size, r + 2 size ... So the steps of N ranks are those of one rank with the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


class Share(NamedTuple):
    """One rank's part of a batch that all ranks divide among them, and how much it counts.

    Of a batch with fewer rows than ranks, one whose parts have different numbers of rows, and one that cannot be
    divided for another reason, every rank computes all: so all take the same steps, and a rule over a whole batch stays
    what it is. Only rank 0 counts it.
    """

    data: Any  # rows of the batch, in its own nest
    total: Any  # how many rows the whole batch has: a number or a scalar tensor
    counted: Any  # whether what this rank makes of it counts, a scalar bool tensor; () where it always does


@dataclass(frozen=True)
class Portion:
    """Which part of a script's data this rank takes."""

    rank: int  # of this process
    size: int  # number of ranks
    batch_is_global: bool = False  # batches that the script names are those of all ranks together, not of each

    def rows_of_batch(self, data: Any) -> Any:
        """Local: this rank's rows of one batch, a nest of arrays or tensors."""
        return tf.nest.map_structure(lambda leaf: _every(leaf, self.rank, self.size), data)

    def share(self, data: Any, *, enough: bool = False, whole: bool = False) -> Share:
        """Local: this rank's share of a batch, of arrays or, in a graph, of tensors.

        Args:
            data: the batch, a nest of arrays, tensors, tables and scalars.
            enough: it is known to have at least as many rows as there are ranks.
            whole: it cannot be divided.
        """
        total, divides = count_rows(data), not whole and (enough or self.divides(data))
        if isinstance(divides, bool):
            counted = () if divides else tf.constant(self.rank == 0)
            return Share(self.rows_of_batch(data) if divides else data, total, counted)
        begin, step = tf.where(divides, self.rank, 0), tf.where(divides, self.size, 1)
        own = tf.nest.map_structure(lambda leaf: _every(leaf, begin, step), data)
        return Share(own, total, divides if self.rank else tf.constant(True))

    def divides(self, data: Any) -> Any:
        """Local: whether a batch can be divided: a bool, or a scalar tensor where that is not known yet."""
        counts = rows_of_parts(data)
        if all(isinstance(count, int) for count in counts):
            return min(counts, default=0) >= self.size and len(set(counts)) == 1
        return tf.logical_and(counts[0] >= self.size, tf.reduce_all(tf.equal(counts, counts[0])))


def has_rows(leaf: Any) -> bool:
    """Local: whether a part of a batch has a first dimension, as far as is known; scalars have none."""
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return False
    return True if isinstance(shape, tf.TensorShape) and shape.rank is None else len(shape) > 0


def count_rows(data: Any) -> Any:
    """Local: the rows of a batch: a number where it is known, else a scalar int32 tensor; 0 without any rows."""
    first = next((leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)), None)
    return 0 if first is None else _count(first)


def rows_of_parts(data: Any) -> list[Any]:
    """Local: how many rows each part of a batch has: a number where it is known, else a scalar int32 tensor."""
    return [_count(leaf) for leaf in tf.nest.flatten(data) if has_rows(leaf)]


def _count(leaf: Any) -> Any:
    known = leaf.shape[0] if not isinstance(leaf.shape, tf.TensorShape) or leaf.shape.rank else None
    if known is not None:
        return int(known)
    return tf.cast(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0], tf.int32)


def take(leaf: Any, rows: NDArray[np.int64]) -> Any:
    """Local: those rows of an array, a tensor or a table."""
    if hasattr(leaf, "iloc"):
        return leaf.iloc[rows]
    if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.Variable):
        return tf.gather(leaf, rows)
    return leaf[rows]


def _every(leaf: Any, begin: Any, step: Any) -> Any:
    """Local: rows begin, begin + step, ... of a part of a batch; what has no rows is each rank's as it is."""
    if not has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        return _every_of_sparse(leaf, tf.cast(begin, tf.int64), tf.cast(step, tf.int64))
    if tf.is_tensor(step) or isinstance(leaf, tf.RaggedTensor):  # of a slice the shape would be unknown
        return tf.gather(leaf, tf.range(begin, count_rows(leaf), step))
    if hasattr(leaf, "iloc"):
        return leaf.iloc[begin::step]
    return (leaf.tocsr() if hasattr(leaf, "tocsr") else leaf)[begin::step]


def _every_of_sparse(leaf: tf.SparseTensor, begin: tf.Tensor, step: tf.Tensor) -> tf.SparseTensor:
    rows = leaf.indices[:, 0] - begin
    own = tf.sparse.retain(leaf, tf.logical_and(rows >= 0, rows % step == 0))
    count = tf.maximum((leaf.dense_shape[0] - begin + step - 1) // step, 0)
    indices = tf.concat([(own.indices[:, :1] - begin) // step, own.indices[:, 1:]], axis=1)
    columns = leaf.shape[1:]
    known = columns.is_fully_defined()  # as layers that build themselves want to know
    rest = tf.constant(columns.as_list(), tf.int64) if known else leaf.dense_shape[1:]
    return tf.SparseTensor(indices, own.values, tf.concat([count[None], rest], axis=0))
