"""Arrays on their way: rounded, and put together again from the shards of several servers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer
from mpitrain.strategies.parameter_server.shards import Shard

State = list[list[Buffer]]  # of each variable its value and slots


def rounded(array: Buffer, dtype: np.dtype[Any]) -> Buffer:
    """Local: as it travels; what is too large for half precision becomes the largest number that is not."""
    if dtype.itemsize >= array.dtype.itemsize:
        return array
    largest = float(np.finfo(dtype).max)
    return np.clip(array, -largest, largest).astype(dtype)


def insert(found: State, shape: tuple[int, ...], shard: Shard, own: Sequence[Buffer]) -> None:
    """Local: rows of one shard into the arrays of their variable."""
    rows = shape[0] if shape else 1
    if shard.end - shard.begin == rows:
        found[shard.variable] = list(own)
        return
    if not found[shard.variable]:
        found[shard.variable] = [np.empty(shape if a.ndim else (), a.dtype) for a in own]
    for target, array in zip(found[shard.variable], own, strict=True):
        if array.ndim:
            target[shard.begin : shard.end] = array
        else:
            target[...] = array
