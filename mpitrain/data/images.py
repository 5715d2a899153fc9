"""Samples that are image files in one folder a class. Files are read when a sample is wanted, not before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from mpitrain.data.source import DataSource, Samples, Share, assemble
from mpitrain.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp")
STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM")
VALIDATION_NAMES = ("validation", "val", "valid")
Shape = tuple[int, int, int]


def load_images(directory: Path, share: Share, image_size: tuple[int, int] | None) -> DataSource:
    """Local: `directory/CLASS/*.png` (jpeg, gif, bmp); classes are numbered in alphabetical order.

    `directory/train/CLASS/...` does as well, beside `validation/` and `test/` with the same classes.
    Images are brought to `image_size` (height, width), or else to the size of the first one; grey stays one
    channel.

    Raises:
        DataError: there are no class folders, no images in one, or files that are no images.
    """
    folders = {folder.name.lower(): folder for folder in _folders(directory)}
    root = folders.get("train", directory)
    classes = [folder.name for folder in _folders(root)]
    if not classes:
        raise DataError(
            f"{root} has no class folders: put the images of each class in a folder of its own, {root}/CLASS/*.png"
        )
    files, labels = _files(root, classes)
    shape = image_shape(files[0], image_size)
    parts: dict[str, Samples | None] = {"validation": None, "test": None}
    if root is not directory:
        for name in (*VALIDATION_NAMES, "test"):
            if name in folders:
                part = "test" if name == "test" else "validation"
                parts[part] = _samples(*_files(folders[name], classes), shape)
    description = f"{directory}, {len(classes)} classes, {shape[0]}x{shape[1]}x{shape[2]}"
    train = _samples(files, labels, shape)
    return assemble(
        train,
        share,
        validation=parts["validation"],
        test=parts["test"],
        num_classes=len(classes),
        description=description,
    )


def decode(data: tf.Tensor, shape: Shape) -> tf.Tensor:
    """An encoded image as float32 in [0, 1], brought to `shape` (height, width, channels)."""
    image = tf.io.decode_image(data, channels=shape[2], expand_animations=False)
    image = tf.image.convert_image_dtype(image, tf.float32)
    same = tf.reduce_all(tf.shape(image)[:2] == shape[:2])
    image = tf.cond(same, lambda: image, lambda: tf.image.resize(image, shape[:2], antialias=True))
    return tf.ensure_shape(image, shape)


def image_shape(file: Path, image_size: tuple[int, int] | None) -> Shape:
    """(height, width, channels) of an image file; an alpha channel is left out.

    Raises:
        DataError: the file cannot be decoded.
    """
    return encoded_shape(file.read_bytes(), str(file), image_size)


def encoded_shape(data: bytes, name: str, image_size: tuple[int, int] | None) -> Shape:
    """(height, width, channels) of an encoded image; an alpha channel is left out.

    Raises:
        DataError: the bytes cannot be decoded.
    """
    try:
        height, width, channels = tf.io.decode_image(data, expand_animations=False).shape
    except tf.errors.OpError as error:
        raise DataError(f"{name} cannot be decoded as an image ({_reason(error)}): replace or remove it") from error
    height, width = image_size or (height, width)
    return height, width, 1 if channels <= 2 else 3


def _reason(error: tf.errors.OpError) -> str:
    return str(error.message).splitlines()[0].rstrip(".") if error.message else "unknown format"


def _folders(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{directory} cannot be listed ({error.strerror}): check that it is a directory you may read"
        ) from error


def _files(root: Path, classes: list[str]) -> tuple[list[Path], list[int]]:
    unknown = [folder.name for folder in _folders(root) if folder.name not in classes]
    if unknown:
        raise DataError(
            f"{root / unknown[0]} is a class that the training images lack: add it there, or remove the folder"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (root / name).rglob("*") if path.is_file() and not path.name.startswith("."))
        if not found and (root / name).is_dir():
            raise DataError(f"{root / name} holds no images: add some, or remove the folder")
        for path in found:
            _check(path)
        files += found
        labels += [label] * len(found)
    return files, labels


def _check(path: Path) -> None:
    """Look at both ends of a file: cheap, and finds empty, mistaken and cut-off ones before training."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} is no image this reads ({', '.join(SUFFIXES)}): convert it, or move it elsewhere")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            file.seek(max(path.stat().st_size - 4096, 0))
            end = file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    if not start.startswith(STARTS):
        raise DataError(f"{path} is no image ({len(end) or 'no'} bytes, unknown format): replace or remove it")
    if (start.startswith(STARTS[0]) and b"IEND" not in end) or (start.startswith(STARTS[1]) and b"\xff\xd9" not in end):
        raise DataError(f"{path} is cut off: copy it again, or remove it")


def _samples(files: list[Path], labels: list[int], shape: Shape) -> Samples:
    with tf.device("CPU:0"):
        names = tf.constant([str(file) for file in files])
        classes = tf.constant(np.asarray(labels, np.int64))

    def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return decode(tf.io.read_file(tf.gather(names, index)), shape), tf.gather(classes, index)

    return Samples(
        len(files),
        lambda positions: positions.map(fetch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True),
    )
