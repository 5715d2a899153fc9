"""Samples that are tf.train.Examples in TFRecord files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from mpitrain.data.features import FeatureSpec, feature_spec
from mpitrain.data.labels import Array, Task, as_labels
from mpitrain.data.records import RecordIndex, index_records
from mpitrain.data.source import DataSource, Samples, Share, assemble
from mpitrain.errors import DataError

BLOCK = 32


def load_tfrecords(
    files: Sequence[Path],
    share: Share,
    task: Task,
    num_classes: int | None,
    spec: str | None,
    image_size: tuple[int, int] | None,
) -> DataSource:
    """Local: one sample a record, in an order shuffled over all files.

    While training, each rank reads the records of its own share alone. All records are read once before, to
    check them and to count the classes.

    Args:
        files: TFRecord files, not compressed.
        share: of this rank.
        task: what the labels are.
        num_classes: as in `as_labels`.
        spec: feature spec as JSON; read from the first record where it says nothing.
        image_size: (height, width) to bring encoded images to.

    Raises:
        DataError: a file is cut off or damaged, or records do not fit the spec.
    """
    index = index_records(files)
    features = feature_spec(index.read(np.zeros(1, np.int64))[0], str(files[0]), spec, image_size)
    name = f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    labels, classes = as_labels(
        _scan_labels(files, features), f"{name}, feature {features.y.name!r}", task, num_classes
    )
    return assemble(_samples(index, features, labels), share, num_classes=classes, description=name)


def _scan_labels(files: Sequence[Path], features: FeatureSpec) -> Array:
    """Read every record once, which also checks its checksum and that both features are there."""
    labels: list[Array] = []
    for file in files:
        before = len(labels)
        records = tf.data.TFRecordDataset(str(file)).map(
            lambda record: tf.io.parse_single_example(record, features.parsers)[features.y.name],
            num_parallel_calls=2,
            deterministic=True,
        )
        try:
            labels += records.as_numpy_iterator()
        except tf.errors.DataLossError as error:
            raise DataError(
                f"{file}: record {len(labels) - before} is damaged (wrong checksum): copy or write the file again"
            ) from error
        except tf.errors.InvalidArgumentError as error:
            raise DataError(
                f"{file}: record {len(labels) - before} lacks feature {features.x.name!r} or "
                f"{features.y.name!r}, or has another "
                "type or number of values there than the first record: make all records alike, or correct "
                "the feature spec"
            ) from error
    return np.stack(labels)


def _samples(index: RecordIndex, features: FeatureSpec, labels: Array) -> Samples:
    with tf.device("CPU:0"):
        constant = tf.constant(labels)

    def fetch(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        records = tf.numpy_function(index.read, [positions], tf.string)
        return tf.ensure_shape(records, [None]), tf.gather(constant, positions)

    def parse(record: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return features.sample(record), label

    def read(positions: tf.data.Dataset) -> tf.data.Dataset:
        records = positions.batch(BLOCK).map(fetch).unbatch()
        return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    return Samples(len(index), read)
