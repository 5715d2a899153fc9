"""Folders of images, one a class."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.checkpoint.options import Position
from mpitrain.data.load import load
from mpitrain.data.source import DataSource, Preprocessing
from mpitrain.errors import DataError
from mpitrain.trainer.damage import locate_damaged_sample


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


@pytest.mark.parametrize("size", [1, 3, 7])
def test_every_image_once_an_epoch(folders: Path, size: int) -> None:
    sources = [read(folders, rank, size, validation_split=0.25) for rank in range(size)]
    train = [pair for source in sources for pair in source.train.as_numpy_iterator()]
    held = [pair for source in sources if source.validation for pair in source.validation.as_numpy_iterator()]
    found = {round(float(x[0, 0, 0]) / 20): int(y) for x, y in train + held}
    assert found == {value: int(value >= 6) for value in range(12)}
    assert (len(train), len(held)) == (9, 3)


def test_images_are_described(folders: Path) -> None:
    source = read(folders)
    assert source.input_shape == (6, 4, 3)
    assert source.num_classes == 2
    assert "2 classes, 6x4x3" in source.description
    assert source.meaning.inputs == "6x4x3, values from 0 to 255"
    assert source.as_info()["class_names"] == ["cat", "dog"]
    assert source.meaning.preprocessing == Preprocessing(255.0)
    assert len(source.train) == source.train_count == 12
    x, y = source.train.element_spec
    assert (x.dtype, y.dtype) == (tf.float32, tf.int64)


def test_images_of_other_sizes_are_brought_to_one(folders: Path) -> None:
    write(folders / "dog" / "big.jpg", image(255, 30, 20))
    assert {x.shape for x, _ in read(folders).train.as_numpy_iterator()} == {(6, 4, 3)}
    resized = list(read(folders, image_size=(8, 9)).train.as_numpy_iterator())
    assert {x.shape for x, _ in resized} == {(8, 9, 3)}
    assert 254 < max(x.max() for x, _ in resized) < 255.1
    assert read(folders, image_size=(8, 9)).meaning.preprocessing.size == (8, 9)
    assert read(folders).meaning.inputs.endswith("; brought to that size, which the first has")


@pytest.mark.parametrize(("channels", "kept"), [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_alpha_is_left_out(tmp_path: Path, channels: int, kept: int) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "1.png", image(9, channels=channels))
    source = read(tmp_path)
    assert source.input_shape == (6, 4, kept)
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
        ("1.png", lambda file: file.write_bytes(b""), "is no image"),
        ("1.png", lambda file: file.write_bytes(b"words"), "is no image"),
        ("1.png", lambda file: file.rename(file.with_suffix(".webp")), "convert it"),
        ("1.png", lambda file: file.unlink(), "holds no images"),
        ("1.png", lambda file: file.write_bytes(file.read_bytes()[:40] + b"IEND"), "cannot be decoded"),
    ],
)
def test_damaged_images_refused(tmp_path: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path / "a" / name, image(1))
    write(tmp_path / "b" / name, image(1))
    damage(tmp_path / "a" / name)
    refusal = refused(tmp_path)
    assert message in refusal
    assert str(tmp_path / "a") in refusal


def test_directories_without_class_folders_refused(tmp_path: Path) -> None:
    assert "no class folders" in refused(tmp_path)
    write(tmp_path / "1.png", image(1))
    assert "no class folders" in refused(tmp_path)


@pytest.mark.parametrize("first", [1, 3])
def test_grey_beside_colour_becomes_colour_whichever_comes_first(tmp_path: Path, first: int) -> None:
    colour = np.zeros((6, 4, 3), np.uint8)
    colour[..., 0] = 200
    write(tmp_path / "a" / "1.png", image(9, channels=1) if first == 1 else colour)
    write(tmp_path / "b" / "1.png", colour if first == 1 else image(9, channels=1))
    found = {int(y): x[0, 0].tolist() for x, y in read(tmp_path).train.as_numpy_iterator()}
    assert sorted(found.values()) == [[9, 9, 9], [200, 0, 0]]


def test_sixteen_bits_stay_sixteen_where_all_have_them(tmp_path: Path) -> None:
    for name, value in (("a", 40000), ("b", 65535)):
        write(tmp_path / name / "1.png", np.full((6, 4, 1), value, np.uint16))
    source = read(tmp_path)
    assert source.meaning.preprocessing.scale == 65535
    assert sorted(x.max() for x, _ in source.train.as_numpy_iterator()) == [40000, 65535]
    write(tmp_path / "b" / "2.png", image(9, channels=1))
    source = read(tmp_path)
    assert source.meaning.preprocessing.scale == 255
    assert sorted(x.max() for x, _ in source.train.as_numpy_iterator()) == [9, 156, 255]


def test_what_file_managers_leave_behind_is_no_sample(folders: Path) -> None:
    for name in ("cat/.ipynb_checkpoints/0-checkpoint.png", "__MACOSX/cat/1.png", ".ipynb_checkpoints/1.png"):
        write(folders / name, image(1))
    for name in ("cat/Thumbs.db", "dog/desktop.ini", "cat/._0.png", "dog/inner/.DS_Store", ".DS_Store"):
        (folders / name).parent.mkdir(exist_ok=True)
        (folders / name).write_bytes(b"\xd0\xcf\x11\xe0")
    write(folders / "dog" / "inner" / "deeper" / "1.png", image(1))
    (folders / "dog" / "round").symlink_to(folders)
    source = read(folders)
    assert (source.train_count, source.num_classes) == (13, 2)
    assert source.meaning.inputs.endswith("; left out: cat/Thumbs.db, dog/desktop.ini, dog/round")


@pytest.mark.parametrize(
    "names", [("train", "validation", "test"), ("Training", "Val", "Testing"), ("train", "dev", "")]
)
def test_parts_have_many_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    for count, part in zip((4, 2, 3), filter(None, names), strict=False):
        for value in range(count):
            write(tmp_path / part / "ab"[value % 2] / f"{value}.png", image(value))
    source = read(tmp_path)
    assert (source.train_count, source.validation_count, source.test_count) == (4, 2, 3 if names[2] else 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["photos/cat/1.png", "photos/dog/1.png"],
            "one class folder only, photos: if its folders are the classes, give",
        ),
        (["cat/1.png"], "one class folder only, cat: give images of at least two classes"),
        (["test/cat/1.png", "valid/dog/1.png"], "none for training"),
        (["test/cat/1.png"], "none for training"),
        (["train/1.png", "test/1.png"], "none of the classes in"),
        (["train/cat/1.png", "train/dog/1.png", "eel/1.png"], "lies beside"),
        (["train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "valid/cat/1.png"], "may both hold validation images"),
        (["cat/1.png", "dog/1.png", "2.png"], "2.png lies beside the class folders"),
        (["train/cat/1.png", "train/dog/1.png", "test/eel/1.png"], "a class that the training images lack"),
    ],
)
def test_folders_that_are_not_meant_so_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        write(tmp_path / name, image(1))
    assert message in refused(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("car", "plane", "train"):
        write(tmp_path / name / "1.png", image(1))
    assert read(tmp_path).as_info()["class_names"] == ["car", "plane", "train"]


def test_a_picture_damaged_in_its_middle_is_named_by_the_rank_that_reads_it(folders: Path) -> None:
    path = folders / "dog" / "7.png"
    data = path.read_bytes()
    path.write_bytes(data[:60] + bytes(4) + data[64:])
    assert str(path) in refused(folders)
    assert [str(path) in _problem(folders, rank, 3) for rank in range(3)].count(True) == 1


def _problem(folder: Path, rank: int, size: int) -> str:
    try:
        read(folder, rank, size)
    except DataError as error:
        return str(error)
    return ""


def test_a_picture_that_is_damaged_later_is_found(folders: Path) -> None:
    sources = [read(folders, rank, 2, validation_split=0.25) for rank in range(2)]
    path = folders / "cat" / "3.png"
    path.write_bytes(path.read_bytes()[:60])
    found = [source.damaged(0, 0) for source in sources]
    assert found.count(None) == 1
    sentence = f"{path} cannot be decoded as an image (Invalid PNG data, size 60): replace or remove it"
    assert next(filter(None, found)) == sentence
    good, bad = sources[found.index(None)], sources[1 - found.index(None)]
    list(good.train.concatenate(good.validation).as_numpy_iterator())
    with pytest.raises(DataError, match=re.escape(sentence)), locate_damaged_sample(bad, Position):
        list(bad.train.concatenate(bad.validation).as_numpy_iterator())
    with pytest.raises(tf.errors.InvalidArgumentError), locate_damaged_sample(good, Position):  # for another reason
        tf.reshape(tf.zeros(3), [2])


def test_palettes_that_would_be_read_as_grey_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "1.png", image(1))
    palette = bytes(value for i in range(256) for value in (i, 255 - i, 0, 0))
    head = b"BM" + bytes(8) + (54 + 1024).to_bytes(4, "little") + (40).to_bytes(4, "little")
    head += (4).to_bytes(4, "little") * 2 + (1).to_bytes(2, "little") + (8).to_bytes(2, "little") + bytes(24)
    (tmp_path / "b" / "2.bmp").write_bytes(head + palette + bytes(16))
    assert "2.bmp is a bmp with a palette of colours" in refused(tmp_path)


def test_fewer_images_than_ranks_refused(folders: Path) -> None:
    assert "12 training samples, too few for 13 ranks" in refused(folders, size=13)
