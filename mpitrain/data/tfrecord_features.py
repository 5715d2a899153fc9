"""Which features of a tf.train.Example are the sample and its label, and how they are stored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from mpitrain.data.image_decoding import FORMATS, STARTS, Form, decode, form_of
from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted

LABEL_NAMES = ("label", "target", "class", "y")
INPUT_NAMES = ("x", "image", "image_raw", "encoded", "features", "data", "input")
Kind = Literal["image", "bytes", "float", "int"]
KINDS: tuple[Kind, ...] = ("image", "bytes", "float", "int")
FORM = '{"x": {"name": "image", "kind": "image"}, "y": {"name": "label", "kind": "int"}}'


@dataclass(frozen=True)
class Feature:
    """One feature: its name, how it is stored, and the shape it is given.

    Kinds: an encoded "image"; raw "bytes", one a value; a "float" or an "int" list. `form` is that of images, and
    `form_is_given` where the user has named their shape.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    form: Form | None = None
    form_is_given: bool = False

    @property
    def parser(self) -> Any:
        """What `tf.io.parse_single_example` wants to know."""
        if self.kind in ("image", "bytes"):
            return tf.io.FixedLenFeature([], tf.string)
        return tf.io.FixedLenFeature(self.shape, tf.float32 if self.kind == "float" else tf.int64)

    def value(self, parsed: tf.Tensor) -> tf.Tensor:
        """The parsed feature as a tensor of this shape, with the values it holds; images and bytes as float32."""
        if self.form is not None:
            return decode(parsed, self.form)
        if self.kind == "bytes":
            return tf.cast(tf.reshape(tf.io.decode_raw(parsed, tf.uint8), self.shape), tf.float32)
        return parsed


@dataclass(frozen=True)
class FeatureSpec:
    """The feature that is the sample, and the one that is its label."""

    x: Feature
    y: Feature

    @property
    def parsers(self) -> dict[str, Any]:
        """What `tf.io.parse_single_example` wants to know of both features."""
        return {self.x.name: self.x.parser, self.y.name: self.y.parser}

    def sample(self, record: tf.Tensor) -> tf.Tensor:
        """The sample in a serialized Example, as float32; grey images get a channel axis."""
        parsed = tf.io.parse_single_example(record, {self.x.name: self.x.parser})
        x = tf.cast(self.x.value(parsed[self.x.name]), tf.float32)
        return x[..., tf.newaxis] if len(self.x.shape) == 2 else x


def misfit(record: bytes, spec: FeatureSpec) -> str:
    """Local: which feature of a record is not as the spec says, and how."""
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception:  # as in `_features`
        return "is no tf.train.Example"
    for feature in (spec.x, spec.y):
        if feature.name not in features:
            return f"lacks feature {feature.name!r}"
        kind = features[feature.name].WhichOneof("kind")
        values = getattr(features[feature.name], kind).value if kind else []
        stored = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int"}.get(kind, "nothing")
        wanted = "bytes" if feature.kind == "image" else feature.kind
        count = 1 if wanted == "bytes" else math.prod(feature.shape)
        if stored != wanted:
            return f"has {stored} in feature {feature.name!r}, where the first record has {wanted}"
        if len(values) != count:
            return (
                f"has {counted(len(values), 'value')} in feature {feature.name!r}, where the first record has {count}"
            )
        if feature.kind == "bytes" and len(values[0]) != math.prod(feature.shape):
            return f"has {counted(len(values[0]), 'byte')} in feature {feature.name!r}, not {math.prod(feature.shape)}"
    return "cannot be parsed"


def feature_spec(record: bytes, name: str, given: str | None, image_size: tuple[int, int] | None) -> FeatureSpec:
    """Read the spec from a file's first record; what the user gave as JSON goes before.

    As in `{"x": {"name": "pixels", "kind": "bytes", "shape": [28, 28, 1]}, "y": {"name": "digit"}}`, of which each part
    may be left out.

    Raises:
        DataError: the record is no Example, or which feature is which cannot be told.
    """
    features = _features(record, name)
    asked = _asked(given)
    y = _label(features, asked["y"], name)
    x_name = asked["x"].get("name") or _input_name([key for key in features if key != y.name], name)
    return FeatureSpec(_input(features, x_name, asked["x"], name, image_size), y)


def _features(record: bytes, name: str) -> Mapping[str, Any]:
    try:
        features: Mapping[str, Any] = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # protobuf's DecodeError lives in a module that differs between versions
        raise DataError(
            f"{name}: the first record is no tf.train.Example: write records as serialized Examples"
        ) from error
    if len(features) < 2:
        raise DataError(
            f"{name}: the first record has {counted(len(features), 'feature')}: it needs a sample and a label"
        )
    return features


def _asked(given: str | None) -> dict[str, dict[str, Any]]:
    try:
        spec = json.loads(given) if given is not None else {}
        parts: dict[str, dict[str, Any]] = {"x": dict(spec.get("x", {})), "y": dict(spec.get("y", {}))}
        unknown = set(spec) - {"x", "y"} | {key for part in parts.values() for key in part} - {"name", "kind", "shape"}
        shapes = [part.get("shape", []) for part in parts.values()]
        sound = all(isinstance(n, int) and n > 0 for shape in shapes for n in shape)
        kinds = {part.get("kind", "int") for part in parts.values()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"the feature spec is not understood ({error}): write it as {FORM}") from error
    if given is not None and not (spec and all(parts[part] for part in spec if part in parts)):
        raise DataError(f"the feature spec {given} says nothing of a feature: write it as {FORM}, or leave it out")
    if unknown or not sound or not kinds <= set(KINDS):
        raise DataError(
            f"the feature spec {given} is not understood: write it as {FORM}, with kinds {', '.join(KINDS)}"
        )
    return parts


def _stored(features: Mapping[str, Any], key: str, name: str) -> tuple[str, Any]:
    if key not in features:
        raise DataError(f"{name} has no feature {key!r}, only {', '.join(sorted(features))}: correct the feature spec")
    kind = features[key].WhichOneof("kind")
    values = getattr(features[key], kind).value if kind else []
    if not len(values):
        raise DataError(f"{name}: feature {key!r} of the first record is empty: write a value in every record")
    return str(kind).removesuffix("_list"), values


def _label(features: Mapping[str, Any], asked: Mapping[str, Any], name: str) -> Feature:
    key = asked.get("name") or _only([key for key in features if _last(key) in LABEL_NAMES], features, "label", name)
    kind, values = _stored(features, key, name)
    if kind.startswith("int"):
        kind = "int"
    if kind == "bytes" or asked.get("kind", kind) != kind:
        raise DataError(f"{name}: label {key!r} is stored as {kind}: store it as an int64 class number, or as floats")
    shape = tuple(asked.get("shape", () if len(values) == 1 else (len(values),)))
    _fits(shape, len(values), key, name)
    return Feature(key, "int" if kind == "int" else "float", shape)


def _input(
    features: Mapping[str, Any], key: str, asked: Mapping[str, Any], name: str, image_size: tuple[int, int] | None
) -> Feature:
    stored, values = _stored(features, key, name)
    shape = tuple(asked.get("shape", ()))
    if stored == "bytes" and asked.get("kind", "image") == "image":
        form = form_of(_hint(values[0], key, name), f"{name}: feature {key!r} of the first record", image_size)
        if len(shape) not in (0, 3) or (shape and image_size):
            raise DataError(
                f"{name}: feature {key!r} is an image: give its shape as [height, width, channels], or --image-size"
            )
        form = Form(shape, form.bits, True) if len(shape) == 3 else form
        return Feature(key, "image", form.shape, form, bool(shape))
    if image_size is not None:
        raise DataError(f"{name}: feature {key!r} is no encoded image: leave out --image-size")
    if stored == "bytes":
        kind: Kind = "bytes"
        count = len(values[0])
    else:
        kind, count = ("float" if stored == "float" else "int"), len(values)
    if asked.get("kind", kind) != kind:
        raise DataError(
            f"{name}: feature {key!r} is stored as {kind}, the feature spec says {asked['kind']}: correct the spec"
        )
    _fits(shape or (count,), count, key, name)
    return Feature(key, kind, shape or (count,))


def _hint(data: bytes, key: str, name: str) -> bytes:
    if not data.startswith(STARTS):
        form = f'{{"x": {{"name": "{key}", "kind": "bytes", "shape": [height, width, channels]}}}}'
        raise DataError(
            f"{name}: feature {key!r} holds {counted(len(data), 'byte')} that are no {FORMATS} image: if "
            f"they are raw pixels, say so in the feature spec: {form}"
        )
    return data


def _fits(shape: tuple[int, ...], count: int, key: str, name: str) -> None:
    if math.prod(shape) != count:
        raise DataError(
            f"{name}: feature {key!r} has {counted(count, 'value')}, which do not make shape {list(shape)}: correct "
            "the feature spec"
        )


def _input_name(names: list[str], name: str) -> str:
    if len(names) == 1:
        return names[0]
    return _only([key for key in names if _last(key) in INPUT_NAMES], names, "sample", name)


def _only(names: list[str], all_names: Any, role: str, name: str) -> str:
    if len(names) != 1:
        raise DataError(
            f"{name} has the features {', '.join(sorted(all_names))}, of which {len(names) or 'none'} may be the "
            f"{role}: name it in the feature spec, {FORM}"
        )
    return names[0]


def _last(key: str) -> str:
    return key.rsplit("/", 1)[-1].lower()
