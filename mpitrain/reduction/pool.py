"""Reused host memory for results that TensorFlow holds for a while.

A fresh array of many MiB costs page faults at every step. TensorFlow takes a 64-byte aligned
numpy array as a tensor without copying and holds a reference until the tensor is gone; a block
whose only references are this pool's own may be used again.
"""

from __future__ import annotations

import sys

import numpy as np

from mpitrain.comm.communicator import Buffer

ALIGNMENT = 64


class BufferPool:
    """Blocks of memory; each is handed out again once nobody else refers to it."""

    def __init__(self) -> None:
        self._blocks = [_block(0)]  # the first is never used: it shows how many references a free block has
        self._free_references = self._references(0)

    def take(self, size: int, dtype: str) -> Buffer:
        """Local: a one-dimensional aligned array of undefined content, in the smallest free block that holds it.

        However much larger that is: what the first buckets of an update leave serves the next ones, and a few
        blocks do for all. The caller may return the array, or views of it, to TensorFlow.
        """
        nbytes = size * np.dtype(dtype).itemsize
        sizes = [block.nbytes for block in self._blocks]
        fitting = [(sizes[index], index) for index in range(1, len(sizes)) if sizes[index] >= nbytes]
        for _, index in sorted(fitting):
            if self._references(index) == self._free_references:
                break
        else:
            index = len(self._blocks)
            self._blocks.append(_block(nbytes))
        return self._blocks[index][:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        return sum(block.nbytes for block in self._blocks)

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._blocks[index])


def _block(nbytes: int) -> Buffer:
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    # numpy lets a view refer to the array at the end of its chain of bases. An array over a
    # memoryview ends the chain, so every view of a block holds a reference to the block.
    return np.frombuffer(raw.data[start : start + nbytes], np.uint8)
