"""Encoded pictures: what their headers say, and how they are decoded.

Headers are read here and not by TensorFlow, which tells size and channels only by decoding the whole picture:
PNG (https://www.w3.org/TR/png-3/), JPEG (ITU-T T.81, annex B), GIF89a, and BMP.
"""

from __future__ import annotations

import inspect
import io
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import keras
import tensorflow as tf

from mpitrain.errors import DataError

FORMATS = "png, jpeg, gif or bmp"
PNG, JPEG, GIF, BMP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM"
STARTS = (PNG, JPEG, GIF, BMP)
Shape = tuple[int, int, int]
# A saved model resizes as the reader does, so only if Keras' layer can.
ANTIALIAS = "antialias" in inspect.signature(keras.layers.Resizing).parameters


@dataclass(frozen=True)
class Header:
    """What a picture is, before it is decoded.

    Attributes:
        height, width: in pixels.
        channels: 1 for grey, 3 for colour; an alpha channel does not count.
        bits: of a value, 8 or 16.
    """

    height: int
    width: int
    channels: int
    bits: int = 8


@dataclass(frozen=True)
class Form:
    """What all pictures of a data set are decoded to."""

    shape: Shape  # (height, width, channels)
    bits: int  # values go from 0 to 2**bits - 1
    resized: bool  # some have another size

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) + f", values from 0 to {2**self.bits - 1}"


def header(data: BinaryIO, name: str) -> Header:
    """Local: what the beginning of a picture says.

    Raises:
        DataError: it is no picture, or of a kind that would be decoded wrongly.
    """
    start = data.read(30)
    try:
        if start.startswith(PNG):
            width, height, depth, kind = struct.unpack(">IIBB", start[16:26])
            # Bit 1 of the colour type says colour, of a palette, too; 1, 2 and 4 bits are decoded to 8.
            found = Header(height, width, 3 if kind & 2 else 1, max(depth, 8))
        elif start.startswith(JPEG):
            found = _jpeg(data)
        elif start.startswith(GIF):
            width, height = struct.unpack("<HH", start[6:10])
            found = Header(height, width, 3)
        elif start.startswith(BMP):
            found = _bmp(start, data, name)
        else:
            raise DataError(f"{name} is no image ({FORMATS}): replace or remove it")
    except (struct.error, ValueError) as error:
        raise DataError(f"{name} is cut off, or no image: copy it again, or remove it") from error
    if not found.height or not found.width:
        raise DataError(f"{name} cannot be decoded as an image (it has no pixels): replace or remove it")
    return found


def _jpeg(data: BinaryIO) -> Header:
    """The frame header, behind any number of other segments."""
    position = 2
    while True:
        data.seek(position)
        mark, kind, length = struct.unpack(">BBH", data.read(4))
        if mark != 0xFF:
            raise ValueError("no segment")
        if kind == 0xFF:  # a byte that fills up
            position += 1
        # Frames of all kinds; the three are tables of Huffman's code, reserved, and of arithmetic coding.
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            _, height, width, components = struct.unpack(">BHHB", data.read(6))
            return Header(height, width, 1 if components == 1 else 3)
        else:
            position += 2 + length


def _bmp(start: bytes, data: BinaryIO, name: str) -> Header:
    """Pictures with a palette are decoded as if their numbers were grey values, so these have to be."""
    width, height = struct.unpack("<ii", start[18:26])
    (bits,) = struct.unpack("<H", start[28:30])
    if bits <= 8:
        data.seek(14 + struct.unpack("<I", start[14:18])[0])
        palette = data.read(4 << bits)
        grey = all(palette[4 * i : 4 * i + 3] == bytes([i]) * 3 for i in range(len(palette) // 4))
        if bits < 8 or not grey:
            raise DataError(f"{name} is a bmp with a palette of colours, which is not read here: convert it to png")
    return Header(abs(height), width, 3)


def form(headers: Sequence[Header], image_size: tuple[int, int] | None) -> Form:
    """Local: what these pictures have in common: colour if any has, 16 bits if all have, the size of the first."""
    first = headers[0]
    height, width = image_size or (first.height, first.width)
    channels = max(one.channels for one in headers)
    return Form(
        (height, width, channels),
        min(one.bits for one in headers),
        any((one.height, one.width) != (height, width) for one in headers),
    )


def decode(data: tf.Tensor, form: Form) -> tf.Tensor:
    """An encoded picture as float32, with the values it holds, brought to the form's shape."""
    dtype = tf.uint16 if form.bits == 16 else tf.uint8
    # Without `expand_animations=False` every gif would have one axis more, that of its pictures.
    image = tf.cast(tf.io.decode_image(data, channels=form.shape[2], dtype=dtype, expand_animations=False), tf.float32)
    same = tf.reduce_all(tf.shape(image)[:2] == form.shape[:2])
    image = tf.cond(same, lambda: image, lambda: tf.image.resize(image, form.shape[:2], antialias=ANTIALIAS))
    return tf.ensure_shape(image, form.shape)


def undecodable(data: bytes, name: str, form: Form) -> str | None:
    """Local: why a picture cannot be decoded; None if it can."""
    try:
        decode(tf.constant(data), form)
    except (tf.errors.OpError, ValueError) as error:
        # Without the names that TensorFlow gives to functions and operations.
        text = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", str(error).splitlines()[0]).strip(" .")[:200]
        return f"{name} cannot be decoded as an image ({text}): replace or remove it"
    return None


def form_of(data: bytes, name: str, image_size: tuple[int, int] | None) -> Form:
    """Local: the form of one encoded picture.

    Raises:
        DataError: it cannot be decoded.
    """
    found = form([header(io.BytesIO(data), name)], image_size)
    wrong = undecodable(data, name, found)
    if wrong is not None:
        raise DataError(wrong)
    return found
