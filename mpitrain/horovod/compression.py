"""How tensors travel, under Horovod's names."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """What makes a tensor smaller on its way."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Local: the tensor that travels, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Local: the tensor again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Local: the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Local: the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Rounded to float16, and summed as such."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Local: the rounded tensor, if it is a floating-point one, and its own dtype."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Local: in its own dtype again."""
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class Compression:
    """The two that there are; any other class with the methods of `Compressor` may be given too."""

    none = NoneCompressor
    fp16 = FP16Compressor
