"""What travels in the place of a tensor, and what it is again."""

from __future__ import annotations

import pytest
import tensorflow as tf

from mpitrain.horovod.compression import Compression, Compressor


@pytest.mark.parametrize(
    ("dtype", "travels"),
    [
        ("float32", "float16"),
        ("float64", "float16"),
        ("bfloat16", "float16"),
        ("float16", "float16"),
        ("int32", "int32"),
    ],
)
def test_half_precision(dtype: str, travels: str) -> None:
    tensor = tf.cast(tf.constant([1, 2, 2049]), dtype)
    sent, context = Compression.fp16.compress(tensor)
    back = Compression.fp16.decompress(sent, context)
    assert (sent.dtype.name, back.dtype.name) == (travels, dtype)
    assert back.numpy().astype("f8").tolist() == [1.0, 2.0, 2049.0 if dtype == "int32" else 2048.0]


def test_as_it_is() -> None:
    tensor = tf.constant([1.0])
    sent, context = Compression.none.compress(tensor)
    assert Compression.none.decompress(sent, context) is tensor
    for method, arguments in ((Compressor.compress, (tensor,)), (Compressor.decompress, (tensor, None))):
        with pytest.raises(NotImplementedError):
            method(*arguments)
