"""Tensors that travel together. Pure: no communication, no TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Tensors exchanged in one call."""

    members: tuple[int, ...]  # positions in the list of gradients, in the order of packing
    offsets: tuple[int, ...]  # first element of each member; at multiples of 64 bytes, unless the bucket is flat
    size: int  # elements in all, gaps between members included
    dtype: str  # in which the sum is taken
    sparse: bool = False  # the one member is `tf.IndexedSlices`
    # TensorFlow joins the members to one tensor, and takes them apart again. That copies them twice, but a tensor that
    # goes through Python on its own costs some 30 us
    flat: bool = False
