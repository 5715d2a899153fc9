"""Reused buffers: never handed out while somebody still refers to them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from mpitrain.reduction.pool import BufferPool


def test_a_block_is_used_again_once_its_views_are_gone() -> None:
    pool = BufferPool()
    array = pool.take(1000, "float32")
    view = array[10:20].reshape(2, 5)
    address = array.ctypes.data
    del array
    other = pool.take(1000, "float32")
    assert other.ctypes.data != address, "a view still refers to the first block"
    del view
    gc.collect()
    assert pool.take(1000, "float32").ctypes.data == address


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 1 << 20])
def test_arrays_are_aligned_and_of_the_right_kind(dtype: str, size: int) -> None:
    array = BufferPool().take(size, dtype)
    assert array.shape == (size,)
    assert array.dtype == dtype
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0


def test_the_smallest_free_block_serves() -> None:
    pool = BufferPool()
    large, small = pool.take(1000, "float64"), pool.take(500, "float64")
    before, address = pool.nbytes, small.ctypes.data
    del large, small
    other = pool.take(100, "float64")
    assert other.ctypes.data == address
    another = pool.take(100, "float64")
    assert pool.nbytes == before, "the large block is free"
    pool.take(100, "float64")
    assert pool.nbytes > before, "none is"
    del other, another


def test_tensorflow_holds_what_it_uses() -> None:
    import tensorflow as tf

    pool = BufferPool()
    kept = tf.Variable(tf.zeros((1000,)))

    def fill(value: np.float32) -> np.ndarray:
        array = pool.take(1000, "float32")
        array.fill(value)
        return array

    @tf.function
    def step(value: tf.Tensor) -> None:
        result = tf.numpy_function(fill, [value], tf.float32)
        result.set_shape((1000,))
        kept.assign(result)

    for value in (1.0, 2.0, 3.0):
        held = kept.value() if value > 1 else None
        step(tf.constant(value))
        np.testing.assert_array_equal(kept.numpy(), value)
        if held is not None:
            np.testing.assert_array_equal(held.numpy(), value - 1)
