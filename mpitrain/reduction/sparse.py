"""Gradients of embeddings: rows of a table, most of which were not touched."""

from __future__ import annotations

import numpy as np

from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.communicator import Buffer, Communicator


def merge_rows(values: Buffer, indices: Buffer) -> tuple[Buffer, Buffer]:
    """Local: add rows of the same index, in the order they stand; sorted by index.

    Args:
        values: (n, ...) rows.
        indices: (n,) integers.

    Returns:
        values (m, ...) and indices (m,), each index once.
    """
    if len(indices) == 0:
        return values, indices
    # Stable: rows of one index stay in rank order, so that all ranks add them in the same.
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return np.add.reduceat(values[order], starts, axis=0), ordered[starts]


def exchange_rows(
    communicator: Communicator, all_reduce: AllReduce, values: Buffer, indices: Buffer, rows: int, factor: float
) -> tuple[Buffer, Buffer]:
    """Collective: the sum over ranks of `factor` times each rank's rows.

    Rows are gathered, or the table is summed whole when that is less traffic; all ranks take the same way, since they
    see the same counts. Rows of this rank are (n, ...), where n may differ between ranks and be 0, with their numbers
    (n,), repetitions allowed; `factor` is this rank's weight.

    Returns:
        values (m, ...), indices (m,): each index once, ascending, the same bits on all ranks.
    """
    dtype = values.dtype
    wide = values.astype(np.float32) if dtype.itemsize == 2 else values
    own_values, own_indices = merge_rows(wide * wide.dtype.type(factor), indices.astype(np.int64))
    size = communicator.size
    counts = np.zeros(size, np.int64)
    communicator.all_gather(np.array([len(own_indices)], np.int64), counts)
    row_shape = values.shape[1:]
    row_size = int(np.prod(row_shape, dtype=np.int64))
    gathered = int(counts.sum()) * (row_size * wide.itemsize + own_indices.itemsize)
    # What each rank receives: of the table by a ring, above of all ranks' rows.
    whole = 2 * (size - 1) / size * rows * row_size * wide.itemsize
    if size > 1 and gathered > whole:
        table = np.zeros((rows, *row_shape), wide.dtype)
        table[own_indices] = own_values
        flat = table.reshape(-1)
        all_reduce.sum(flat, flat)
        return table.astype(dtype, copy=False), np.arange(rows, dtype=indices.dtype)
    all_values = np.empty((int(counts.sum()), *row_shape), wide.dtype)
    all_indices = np.empty(int(counts.sum()), np.int64)
    communicator.all_gather_v(np.ascontiguousarray(own_values), all_values, [int(c) * row_size for c in counts])
    communicator.all_gather_v(np.ascontiguousarray(own_indices), all_indices, [int(c) for c in counts])
    merged_values, merged_indices = merge_rows(all_values, all_indices)
    return merged_values.astype(dtype, copy=False), merged_indices.astype(indices.dtype, copy=False)
