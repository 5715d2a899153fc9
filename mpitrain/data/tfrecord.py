"""Samples that are tf.train.Examples in TFRecord files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tensorflow as tf

from mpitrain.data.image_decoding import Header, form, header, undecodable
from mpitrain.data.image_folders import DECODED_BYTES
from mpitrain.data.labels import Array, Labels, Task, as_labels
from mpitrain.data.sharding import Indices
from mpitrain.data.source import DataSource, Meaning, Preprocessing, Samples, Share, assemble
from mpitrain.data.tfrecord_features import FeatureSpec, feature_spec, misfit
from mpitrain.data.tfrecord_index import RecordIndex, index_records
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

    While training, each rank reads the records of its own share alone. All records are read once before, to check them
    and to count the classes. `spec` is the feature spec as JSON; what it does not say is read from the first record.

    Raises:
        DataError: a file is cut off or damaged, or records do not fit the spec.
    """
    index = index_records(files)
    features = feature_spec(index.read(np.zeros(1, np.int64))[0], str(files[0]), spec, image_size)
    name = f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    values, headers = _scan(index, features)
    if headers and not features.x.form_is_given:
        common = form(headers, image_size)
        features = replace(features, x=replace(features.x, shape=common.shape, form=common))
    if int(index.bytes_of.sum()) <= DECODED_BYTES * max(share.size, 1):
        wrong = _damaged(index, features, np.arange(share.rank, len(index), max(share.size, 1)))
        if wrong is not None:
            raise DataError(wrong)
    labels = as_labels(values, f"feature {features.y.name!r}", task, num_classes, place=index.place)
    return assemble(
        _samples(index, features, labels.values),
        share,
        num_classes=labels.num_classes,
        description=name,
        meaning=_meaning(features, labels),
    )


def _meaning(features: FeatureSpec, labels: Labels) -> Meaning:
    x = features.x
    scale, size = (255.0, None) if x.kind == "bytes" else (1.0, None)
    what = f"{'x'.join(map(str, x.shape))} {'bytes from 0 to 255' if x.kind == 'bytes' else x.kind}"
    if x.form is not None:
        height, width, _ = x.form.shape
        scale, size = 2.0**x.form.bits - 1, (height, width) if x.form.resized else None
        what = f"{x.form}{'; brought to that size' if x.form.resized else ''}"
    return Meaning(
        f"feature {x.name}, {what}", f"feature {features.y.name}, {labels.meaning}", None, Preprocessing(scale, size)
    )


def _scan(index: RecordIndex, features: FeatureSpec) -> tuple[Array, list[Header]]:
    """Read every record once: labels, and headers of images. Checksums and values are looked at, too."""
    x = features.x

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_single_example(record, features.parsers)
        if x.kind in ("float", "int"):
            seen = tf.reduce_all(tf.math.is_finite(tf.cast(parsed[x.name], tf.float32)))
        else:
            seen = parsed[x.name] if x.form is not None else tf.strings.length(parsed[x.name]) == math.prod(x.shape)
        return parsed[features.y.name], seen

    labels: list[Array] = []
    headers: list[Header] = []
    # In order: a record that is wrong is named by its number.
    records = tf.data.TFRecordDataset([str(file) for file in index.files]).map(
        parse, num_parallel_calls=2, deterministic=True
    )
    try:
        for label, seen in records.as_numpy_iterator():
            if x.form is not None:
                headers.append(header(io.BytesIO(seen), f"{index.name(len(labels))}, feature {x.name!r},"))
            elif not seen:
                why = (
                    "values that are not finite" if x.kind != "bytes" else "another number of bytes than the first has"
                )
                raise DataError(f"{index.name(len(labels))} has {why} in feature {x.name!r}: remove or mend it")
            labels.append(label)
    except tf.errors.DataLossError as error:
        raise DataError(
            f"{index.name(len(labels))} is damaged (wrong checksum): copy or write the file again"
        ) from error
    except tf.errors.InvalidArgumentError as error:
        record = index.read(np.asarray([len(labels)]))[0]
        raise DataError(
            f"{index.name(len(labels))} {misfit(record, features)}: make all records alike, or correct the feature spec"
        ) from error
    return np.stack(labels), headers


def _damaged(index: RecordIndex, features: FeatureSpec, positions: Indices) -> str | None:
    """Local: the first of some records whose image cannot be decoded, and why."""
    if features.x.form is None:
        return None
    for position in positions.tolist():
        example = tf.train.Example.FromString(index.read(np.asarray([position]))[0])
        (data,) = example.features.feature[features.x.name].bytes_list.value
        wrong = undecodable(data, f"{index.name(position)}, feature {features.x.name!r},", features.x.form)
        if wrong is not None:
            return wrong
    return None


def _samples(index: RecordIndex, features: FeatureSpec, labels: Array) -> Samples:
    with tf.device("CPU:0"):
        constant = tf.constant(labels)

    def fetch(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        records = tf.numpy_function(index.read, [positions], tf.string)
        return tf.ensure_shape(records, [None]), tf.gather(constant, positions)

    def parse(record: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return features.sample(record), label

    def read(positions: tf.data.Dataset) -> tf.data.Dataset:
        # A call of Python for each block of records, and each file is opened once for it.
        records = positions.batch(BLOCK).map(fetch).unbatch()
        return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    return Samples(len(index), read, lambda positions: _damaged(index, features, positions))
