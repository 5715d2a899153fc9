"""Tensors that travel together. Pure: no communication, no TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Tensors exchanged in one call.

    Attributes:
        members: positions in the list of gradients, in the order of packing.
        offsets: first element of each member; at multiples of 64 bytes, unless the bucket is flat.
        size: elements in all, gaps between members included.
        dtype: in which the sum is taken.
        sparse: the one member is `tf.IndexedSlices`.
        flat: TensorFlow joins the members to one tensor, and takes them apart again. That copies them twice, but
            a tensor that goes through Python on its own costs some 30 us.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    dtype: str
    sparse: bool = False
    flat: bool = False
