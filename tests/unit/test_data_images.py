"""Folders of images, one a class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.load import load
from mpitrain.data.source import DataSource
from mpitrain.errors import DataError


def read(spec: Path, rank: int = 0, size: int = 1, **options: Any) -> DataSource:
    return load(str(spec), rank=rank, size=size, **{"validation_split": 0.0, "seed": 0, **options})


def refused(spec: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def image(value: int, height: int = 6, width: int = 4, channels: int = 3) -> Any:
    return np.full((height, width, channels), value, np.uint8)


def write(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = tf.io.encode_jpeg if path.suffix == ".jpg" else tf.io.encode_png
    path.write_bytes(encode(pixels).numpy())


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Twelve images of two classes: 0 to 5 are cats, 6 to 11 are dogs."""
    for value in range(12):
        write(tmp_path / ("cat" if value < 6 else "dog") / f"{value}.png", image(20 * value))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_image_once_an_epoch(folders: Path, size: int) -> None:
    sources = [read(folders, rank, size, validation_split=0.25) for rank in range(size)]
    train = [pair for source in sources for pair in source.train.as_numpy_iterator()]
    held = [pair for source in sources if source.validation for pair in source.validation.as_numpy_iterator()]
    found = {round(float(x[0, 0, 0]) * 255 / 20): int(y) for x, y in train + held}
    assert found == {value: int(value >= 6) for value in range(12)}
    assert (len(train), len(held)) == (9, 3)


def test_images_are_scaled_and_described(folders: Path) -> None:
    source = read(folders)
    assert source.input_shape == (6, 4, 3)
    assert source.num_classes == 2
    assert "2 classes, 6x4x3" in source.description
    assert len(source.train) == source.train_count == 12
    x, y = source.train.element_spec
    assert (x.dtype, y.dtype) == (tf.float32, tf.int64)


def test_images_of_other_sizes_are_brought_to_one(folders: Path) -> None:
    write(folders / "dog" / "big.jpg", image(255, 30, 20))
    assert {x.shape for x, _ in read(folders).train.as_numpy_iterator()} == {(6, 4, 3)}
    resized = list(read(folders, image_size=(8, 9)).train.as_numpy_iterator())
    assert {x.shape for x, _ in resized} == {(8, 9, 3)}
    assert max(x.max() for x, _ in resized) <= 1.0001


@pytest.mark.parametrize(("channels", "kept"), [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_alpha_is_left_out(tmp_path: Path, channels: int, kept: int) -> None:
    write(tmp_path / "a" / "1.png", image(9, channels=channels))
    source = read(tmp_path)
    assert source.input_shape == (6, 4, kept)
    assert source.num_classes == 1
    assert next(source.train.as_numpy_iterator())[0].shape == (6, 4, kept)


def test_parts_in_folders_of_their_own(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 2), ("test", 3)):
        for value in range(count):
            write(tmp_path / part / "ab"[value % 2] / f"{value}.png", image(value))
    source = read(tmp_path, validation_split=0.5)
    assert (source.train_count, source.validation_count, source.test_count) == (4, 2, 3)
    assert source.test is not None
    assert sorted(int(y) for _, y in source.test.as_numpy_iterator()) == [0, 0, 1]
    write(tmp_path / "test" / "c" / "1.png", image(1))
    assert "training images lack" in refused(tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("1.png", cut, "cut off"),
        ("1.jpg", cut, "cut off"),
        ("1.png", lambda file: file.write_bytes(b""), "no image (no bytes"),
        ("1.png", lambda file: file.write_bytes(b"words"), "no image (5 bytes"),
        ("1.png", lambda file: file.rename(file.with_suffix(".webp")), "convert it"),
        ("1.png", lambda file: file.unlink(), "holds no images"),
        ("1.png", lambda file: file.write_bytes(file.read_bytes()[:40] + b"IEND"), "cannot be decoded"),
    ],
)
def test_damaged_images_refused(tmp_path: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path / "a" / name, image(1))
    damage(tmp_path / "a" / name)
    refusal = refused(tmp_path)
    assert message in refusal
    assert str(tmp_path / "a") in refusal


def test_directories_without_class_folders_refused(tmp_path: Path) -> None:
    assert "no class folders" in refused(tmp_path)
    write(tmp_path / "1.png", image(1))
    assert "no class folders" in refused(tmp_path)


def test_fewer_images_than_ranks_refused(folders: Path) -> None:
    assert "12 training samples are too few for 13 ranks" in refused(folders, size=13)
