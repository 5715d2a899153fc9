"""Which features of a record are the sample and its label; files of records are in `test_tfrecord`."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from mpitrain.data.tfrecord_features import Feature, FeatureSpec, feature_spec, misfit
from mpitrain.errors import DataError

X, Y = Feature("x", "float", (2,)), Feature("y", "int", ())
SPEC = FeatureSpec(X, Y)


def record(**features: Any) -> bytes:
    """A serialized Example: texts, floats or whole numbers."""
    made = {}
    for name, values in features.items():
        if isinstance(values, bytes):
            made[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[values]))
        elif values and isinstance(values[0], float):
            made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return bytes(tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString())


GOOD = record(x=[0.5, 1.0], y=[3])


def test_they_are_told_apart_by_name_and_kind() -> None:
    assert feature_spec(GOOD, "a file", None, None) == SPEC
    assert feature_spec(record(**{"part/data": [1, 2], "label": [0.5]}), "a file", None, None) == FeatureSpec(
        Feature("part/data", "int", (2,)), Feature("label", "float", ())
    )
    given = '{"x": {"name": "y", "shape": [1]}, "y": {"name": "x"}}'
    assert feature_spec(GOOD, "a file", given, None) == FeatureSpec(
        Feature("y", "int", (1,)), Feature("x", "float", (2,))
    )
    raw = feature_spec(record(x=b"abcd", y=[1]), "a file", '{"x": {"kind": "bytes", "shape": [2, 2]}}', None)
    assert raw.x == Feature("x", "bytes", (2, 2))


def test_a_sample_is_float32_and_grey_images_have_a_channel() -> None:
    assert SPEC.sample(tf.constant(GOOD)).numpy().tolist() == [0.5, 1.0]
    grey = FeatureSpec(Feature("x", "bytes", (2, 2)), Y).sample(tf.constant(record(x=bytes([0, 1, 2, 255]), y=[1])))
    assert grey.dtype == tf.float32
    assert grey.numpy().tolist() == [[[0.0], [1.0]], [[2.0], [255.0]]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff", "is no tf.train.Example"),
        (record(x=[0.5, 1.0]), "lacks feature 'y'"),
        (record(x=[1, 2], y=[3]), "has int in feature 'x', where the first record has float"),
        (record(x=[0.5], y=[3]), "has 1 value in feature 'x', where the first record has 2"),
        (record(x=[], y=[3]), "has int in feature 'x'"),
        (GOOD, "cannot be parsed"),  # it can, so it is not asked for
    ],
    ids=lambda one: "a record" if isinstance(one, bytes) else str(one),
)
def test_what_is_wrong_with_a_later_record(content: bytes, told: str) -> None:
    assert told in misfit(content, SPEC)


def test_raw_bytes_of_another_length_are_told() -> None:
    spec = FeatureSpec(Feature("x", "bytes", (2, 2)), Y)
    assert misfit(record(x=b"abc", y=[1]), spec) == "has 3 bytes in feature 'x', not 4"


@pytest.mark.parametrize(
    ("content", "given", "told"),
    [
        (record(a=[0.5], b=[1.5], c=[2]), None, "of which none may be the label"),
        (record(a=[0.5], b=[1.5], y=[2]), None, "of which none may be the sample"),
        (GOOD, '{"x": {"name": "z"}}', "no feature 'z', only x, y"),
        (GOOD, '{"x": {"shape": [3]}}', "has 2 values, which do not make shape [3]"),
        (record(x=b"abcd", y=[1]), None, "holds 4 bytes that are no"),
    ],
    ids=lambda one: "a record" if isinstance(one, bytes) else str(one),
)
def test_what_cannot_be_told_is_asked_for(content: bytes, given: str | None, told: str) -> None:
    with pytest.raises(DataError) as caught:
        feature_spec(content, "a file", given, None)
    assert told in str(caught.value)
