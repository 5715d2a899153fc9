"""The mean of gradients on their server, and the factors of clipping by norms. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer
from mpitrain.reduction.sparse import merge_rows
from mpitrain.strategies.parameter_server.shards import Part

Rows = tuple[Buffer, Buffer]


def weights(samples: Sequence[float]) -> list[float]:
    """Local: of contributions of so many samples; they add up to 1, or to 0 where there are no samples."""
    total = float(sum(samples))
    return [one / total if total else 0.0 for one in samples]


def mean(arrays: Sequence[Buffer], samples: Sequence[float], dtype: str) -> Buffer:
    """Local: the mean over samples, added up in the order given; the first array may be changed.

    What has no samples does not count, whatever it is.
    """
    counted = [place for place, number in enumerate(samples) if number > 0]
    if not counted:
        return np.zeros(arrays[0].shape, dtype)
    arrays, samples = [arrays[place] for place in counted], [samples[place] for place in counted]
    if len(arrays) == 1:
        return arrays[0].astype(dtype, copy=False)
    equal_shares = len(set(samples)) == 1
    factors = weights(samples)
    total = arrays[0].astype(dtype, copy=False)
    if not equal_shares:
        total *= total.dtype.type(factors[0])
    for array, factor in zip(arrays[1:], factors[1:], strict=True):
        total += array if equal_shares else array.astype(dtype, copy=False) * total.dtype.type(factor)
    if equal_shares:
        total *= total.dtype.type(1.0 / len(arrays))
    return total


def mean_rows(rows: Sequence[Rows], samples: Sequence[float], dtype: str) -> Rows:
    """Local: the same of rows of a table: each row once, ascending."""
    kind = np.dtype(dtype).type
    factors = weights(samples)
    pairs = [(one, factor) for one, factor in zip(rows, factors, strict=True) if factor]
    if not pairs:
        return rows[0][0][:0].astype(dtype, copy=False), rows[0][1][:0]
    values = np.concatenate([v.astype(dtype, copy=False) * kind(factor) for (v, _), factor in pairs])
    return merge_rows(values, np.concatenate([indices for (_, indices), _ in pairs]))


def squares(part: Part, content: Any, variables: int) -> Buffer:
    """Local: (variables,) sums of squares of the gradients in one part."""
    sums = np.zeros(variables)
    if part.sparse:
        sums[part.pieces[0].shard.variable] = np.sum(np.square(content[0], dtype=np.float64))
        return sums
    for piece in part.pieces:
        own = content[piece.offset : piece.offset + piece.shard.size]
        sums[piece.shard.variable] += np.dot(own.astype(np.float64, copy=False), own)
    return sums


def clip_factors(sums: Buffer, clipnorm: float | None, global_clipnorm: float | None) -> Buffer:
    """Local: on the gradient of each variable, as Keras clips: by its own norm, else by that of all."""
    if clipnorm:
        return np.asarray(clipnorm / np.maximum(np.sqrt(sums), clipnorm))
    if global_clipnorm:
        norm = float(np.sqrt(sums.sum()))
        scale = global_clipnorm / max(norm, global_clipnorm) + (norm - norm)  # NaN where the norm is not finite
        return np.full(len(sums), scale)
    return np.ones(len(sums))
