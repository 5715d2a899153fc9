"""TFRecord files: any rank finds any record, and damaged files are named."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.load import load
from mpitrain.data.source import DataSource, Preprocessing
from mpitrain.errors import DataError

RAW = '{"x": {"name": "pixels", "kind": "bytes", "shape": [2, 3]}}'


def read(spec: Path | str, rank: int = 0, size: int = 1, **options: Any) -> DataSource:
    return load(str(spec), rank=rank, size=size, **{"validation_split": 0.0, "seed": 0, **options})


def refused(spec: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def example(**features: Any) -> bytes:
    made = {}
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        elif np.asarray(value).dtype.kind == "f":
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(value)))
        else:
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(value)))
        made[name.replace("__", "/")] = feature
    serialized: bytes = tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()
    return serialized


def write(path: Path, records: list[bytes]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Fourteen samples in two files; sample i holds i and 1.0, and is of class i % 3."""
    samples = [example(x=[float(i), 1.0], label=i % 3) for i in range(14)]
    write(tmp_path / "a.tfrecord", samples[:5])
    write(tmp_path / "b.tfrecord", samples[5:])
    return tmp_path


@pytest.mark.parametrize("size", [1, 3, 7])
def test_every_record_once_an_epoch(files: Path, size: int) -> None:
    sources = [read(files / "*.tfrecord", rank, size, validation_split=0.3) for rank in range(size)]
    for _ in range(2):
        train = [pair for source in sources for pair in source.train.as_numpy_iterator()]
        held = [pair for source in sources if source.validation for pair in source.validation.as_numpy_iterator()]
        assert sorted((int(x[0]), int(y)) for x, y in train + held) == [(i, i % 3) for i in range(14)]
        assert (len(train), len(held)) == (10, 4)
    assert sources[0].num_classes == 3


def test_records_are_shuffled_over_the_files(files: Path) -> None:
    source = read(files)
    epochs = [[int(x[0]) for x, _ in source.train.as_numpy_iterator()] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert len(source.train) == 14
    assert any(value >= 5 for value in epochs[0][:5])


def test_encoded_images_are_decoded(tmp_path: Path) -> None:
    png = tf.io.encode_png(np.full((4, 5, 1), 255, np.uint8)).numpy()
    file = write(tmp_path / "a.tfrecord", [example(image__encoded=png, image__class__label=1, image__height=4)] * 3)
    source = read(file, num_classes=2)
    assert source.input_shape == (4, 5, 1)
    x, y = next(source.train.as_numpy_iterator())
    assert (x.min(), int(y)) == (255.0, 1)
    assert source.meaning.preprocessing == Preprocessing(255.0)
    assert read(file, num_classes=2, image_size=(8, 8)).meaning.preprocessing.size == (8, 8)


def test_raw_bytes_with_a_feature_spec(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tfrecord", [example(pixels=bytes([0, 51, 102, 153, 204, 255]), y=0.5)] * 2)
    source = read(file, feature_spec=RAW)
    assert (source.input_shape, source.num_classes) == ((2, 3, 1), None)
    x, y = next(source.train.as_numpy_iterator())
    assert np.allclose(x.ravel(), np.arange(6) * 51)
    assert y == 0.5


def test_lists_are_given_a_shape(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.tfrecord", [example(values=np.arange(6), digit=1), example(values=np.arange(6), digit=0)]
    )
    spec = '{"x": {"shape": [1, 2, 3]}, "y": {"name": "digit"}}'
    source = read(file, feature_spec=spec)
    assert source.input_shape == (1, 2, 3)
    assert next(source.train.as_numpy_iterator())[0].tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_shards_without_a_suffix(tmp_path: Path) -> None:
    samples = [example(x=[float(i), 1.0], label=i % 3) for i in range(14)]
    for shard in range(4):
        write(tmp_path / f"train-{shard:05}-of-00004", samples[shard::4])
    for spec in (tmp_path, tmp_path / "train-*"):
        source = read(spec)
        assert sorted(int(x[0]) for x, _ in source.train.as_numpy_iterator()) == list(range(14))
    (tmp_path / "inner").mkdir()
    for file in tmp_path.glob("train-*"):
        file.rename(tmp_path / "inner" / file.name)
    assert f"such as {tmp_path / 'inner'}" in refused(tmp_path)


def test_records_of_pictures_are_like_folders_of_them(tmp_path: Path) -> None:
    """Colour if one is, the size of the first, and the one that is damaged is named."""
    grey = tf.io.encode_png(np.full((4, 5, 1), 100, np.uint8)).numpy()
    colour = tf.io.encode_jpeg(np.full((8, 9, 3), 200, np.uint8)).numpy()
    records = [example(image=grey, label=0), example(image=colour, label=1)]
    source = read(write(tmp_path / "a.tfrecord", records))
    assert source.input_shape == (4, 5, 3)
    assert source.meaning.preprocessing == Preprocessing(255.0, (4, 5))
    damaged = colour[:-40] + bytes(38) + colour[-2:]
    records.append(example(image=grey[:50] + bytes(len(grey) - 50), label=1))
    assert "a.tfrecord: record 2, feature 'image', cannot be decoded" in refused(
        write(tmp_path / "a.tfrecord", records)
    )
    records[2] = example(image=damaged[:100], label=1)
    assert "record 2, feature 'image', is cut off" in refused(write(tmp_path / "a.tfrecord", records))
    records[2] = example(image=b"RIFF$\0\0\0WEBPVP8 ", label=1)
    assert "record 2, feature 'image', is no image" in refused(write(tmp_path / "a.tfrecord", records))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{", "not understood"),
        ("[]", "not understood"),
        ('{"z": {}}', "not understood"),
        ("", "not understood"),
        ("{}", "the feature spec {} says nothing of a feature"),
        ('{"x": {}}', "says nothing of a feature"),
        ('{"x": {"name": "x"}, "y": {}}', "says nothing of a feature"),
        ('{"x": {"kind": "video"}}', "not understood"),
        ('{"x": {"shape": [-1]}}', "not understood"),
        ('{"x": {"name": "z"}}', "no feature 'z', only label, x"),
        ('{"x": {"shape": [3]}}', "do not make shape [3]"),
        ('{"x": {"kind": "int"}}', "stored as float"),
    ],
)
def test_feature_specs_refused(files: Path, spec: str, message: str) -> None:
    assert message in refused(files, feature_spec=spec)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([b"words"], "no tf.train.Example"),
        ([example(x=[1.0])], "1 feature:"),
        ([example(a=[1.0], b=[1.0])], "none may be the label"),
        ([example(a=[1.0], b=[1.0], y=0)], "none may be the sample"),
        ([example(x=[1.0], y=b"cat")], "stored as bytes"),
        ([example(x=b"abc", y=0)], "if they are raw pixels"),
        ([example(x=b"\x89PNG\r\n\x1a\n", y=0)], "is cut off, or no image"),
        ([example(x=[1.0], y=-1)], "the label of record 0 of"),
        ([example(x=[1.0], y=0), example(x=[1.0, 2.0], y=0)], "record 1 has 2 values in feature 'x', where the first"),
        ([example(x=[1.0], y=0), example(x=[1.0])], "record 1 lacks feature 'y'"),
        ([example(x=[1.0], y=0), example(x=[1.0], y=0.5)], "record 1 has float in feature 'y', where the first record"),
        ([example(x=[1.0], y=0), example(x=[1.0], y=1), b"words"], "record 2 is no tf.train.Example"),
        ([example(x=[1.0], y=0), example(x=[np.nan], y=1)], "record 1 has values that are not finite in feature 'x'"),
        ([example(x=[1.0], y=0.5)], "too few for 2 ranks"),
        ([], "is empty"),
    ],
)
def test_records_refused(tmp_path: Path, records: list[bytes], message: str) -> None:
    assert message in refused(write(tmp_path / "a.tfrecord", records), size=2)


def flip(data: bytes) -> bytes:
    return data[:-10] + bytes([data[-10] ^ 0xFF]) + data[-9:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-3], "cut off in record 8"),
        (lambda data: data + b"\x00" * 5, "cut off in record 9"),
        (lambda data: b"words, not records", "cut off in record 0"),
        (flip, "record 8 is damaged"),
        (gzip.compress, "gunzip"),
        (zlib.compress, "compressed (ZLIB)"),
        (lambda data: zlib.compress(data, 9), "compressed (ZLIB)"),
    ],
)
def test_damaged_files_refused(files: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    file = files / "b.tfrecord"
    file.write_bytes(damage(file.read_bytes()))
    refusal = refused(files / "*.tfrecord")
    assert message in refusal
    assert "b.tfrecord" in refusal


def test_files_in_folders_refused_with_the_one_to_train_on(files: Path, tmp_path: Path) -> None:
    for name in ("test", "train"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "a.tfrecord").write_bytes((files / "b.tfrecord").read_bytes())
    assert refused(tmp_path / "tree").endswith("tree/train")
