"""The model to train: built by name, loaded from a file, or made by a function of the user's."""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from mpitrain.data.function import call, resolve
from mpitrain.data.image_decoding import ANTIALIAS
from mpitrain.data.load import FUNCTION
from mpitrain.data.source import Preprocessing
from mpitrain.errors import ModelError, in_one_line

KINDS = "cnn, mlp, a name from keras.applications, a saved .keras file, or package.module:function"
SMALLEST = re.compile(r"at least (\d+)x(\d+)")
Shape = tuple[int | None, ...]


def build(
    spec: str,
    *,
    input_shape: Sequence[int | None],
    num_classes: int | None,
    seed: int,
    outputs: int = 1,
    preprocessing: Preprocessing | None = None,
) -> keras.Model:
    """Local: the model that `spec` names, with the same weights for the same seed; not compiled.

    Sets the seeds of Python, numpy and TensorFlow. New models end in a softmax in float32, whatever the
    precision, or for a regression in a linear layer.

    Args:
        spec: cnn, mlp, a name from `keras.applications` (without weights), a saved `.keras` file, or
            `package.module:function`. The function is given those of input_shape, num_classes and seed that
            it has parameters for.
        input_shape: shape of one sample.
        num_classes: None for a regression.
        seed: of the initial weights.
        outputs: numbers a sample that a regression predicts.
        preprocessing: what new models begin with; the user's own take samples as they are.

    Raises:
        ModelError: one sentence that says why there is no such model for such samples.
    """
    # On all ranks alike: weights would become rank 0's anyway, and what else is drawn would not.
    keras.utils.set_random_seed(seed)
    shape = tuple(input_shape)
    if spec.endswith(".keras"):
        return _saved(spec)
    if FUNCTION.fullmatch(spec):
        return _from_function(spec, input_shape=shape, num_classes=num_classes, seed=seed)
    if None in shape:
        raise ModelError(f"{spec} needs samples of one fixed shape, these have {shape}: resize or pad them")
    units = outputs if num_classes is None else num_classes
    builders: dict[str, Callable[..., keras.Model]] = {"cnn": _cnn, "mlp": _mlp}
    builder = builders.get(spec) or (lambda *arguments: _application(spec, *arguments))
    return builder(Beginning(shape, preprocessing or Preprocessing()), units, num_classes is not None)


@dataclass(frozen=True)
class Beginning:
    """What a new model begins with."""

    shape: Shape  # of the samples that are trained on
    preprocessing: Preprocessing  # of samples as the files hold them

    def layers(self) -> tuple[Any, Any]:
        """Local: the model's input, as the files hold samples, and what comes out of its first layers."""
        scale, size = self.preprocessing.scale, self.preprocessing.size
        inputs = hidden = keras.Input(self.shape if size is None else (None, None, self.shape[-1]))
        # In float32 whatever the precision: half of it holds no 65535.
        if size is not None:
            hidden = _resized(hidden, size, **({"antialias": True} if ANTIALIAS else {}))
        if scale != 1:
            hidden = keras.layers.Rescaling(1 / scale, dtype="float32")(hidden)
        return inputs, hidden


def _resized(images: Any, size: tuple[int, int], **options: Any) -> Any:
    """Images of another size, in float32 whatever the precision.

    The layer is told that this is no training, for else it takes it for one, and so do those behind it, where a model
    is called without saying.
    """
    return keras.layers.Resizing(*size, dtype="float32", **options)(images, training=False)


def is_own(spec: str) -> bool:
    """Local: whether a model is the user's, and not built here."""
    return spec.endswith(".keras") or FUNCTION.fullmatch(spec) is not None


def _saved(spec: str) -> keras.Model:
    path = Path(spec).expanduser()
    if not path.exists():
        raise ModelError(f"there is no model file {spec}: correct the path, or name one of {KINDS}")
    try:
        return keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # Keras has no common class for what can be wrong with a file
        # Of one that is no archive Keras says that it is not there.
        reason = in_one_line(error) if zipfile.is_zipfile(path) else "it is none that Keras has written, or cut off"
        raise ModelError(
            f"{spec} cannot be loaded as a Keras model ({reason}): save it again with model.save, or build it in a "
            "function and name that, package.module:function"
        ) from error


def _from_function(spec: str, **arguments: Any) -> keras.Model:
    function = resolve(spec, ModelError)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    wanted = {parameter.name for parameter in parameters}
    given = {name: value for name, value in arguments.items() if takes_all or name in wanted}
    model = call(function, spec, ModelError, **given)
    if not isinstance(model, keras.Model):
        raise ModelError(f"{spec} returns a {type(model).__name__}: return a keras.Model")
    return model


def _end(hidden: Any, units: int, classify: bool) -> Any:
    hidden = keras.layers.Dense(units, name="logits" if classify else "values")(hidden)
    return keras.layers.Activation("softmax" if classify else "linear", dtype="float32", name="output")(hidden)


def _mlp(beginning: Beginning, units: int, classify: bool) -> keras.Model:
    inputs, hidden = beginning.layers()
    # The columns of a table have scales of their own; pixels lie in [0, 1].
    first = keras.layers.Flatten() if len(beginning.shape) > 1 else keras.layers.BatchNormalization()
    hidden = first(hidden)
    for _ in range(2):
        hidden = keras.layers.Dense(128, activation="relu")(hidden)
    return keras.Model(inputs, _end(hidden, units, classify), name="mlp")


def _cnn(beginning: Beginning, units: int, classify: bool) -> keras.Model:
    """Convolutions of 3x3, twice, then half the size with twice the filters, until about 4x4 are left."""
    height, width = _image("cnn", beginning.shape)
    layers = keras.layers
    inputs, hidden = beginning.layers()
    filters, side = 16, min(height, width)
    while True:
        for width_of in (filters, 2 * filters):
            hidden = layers.Conv2D(width_of, 3, padding="same", activation="relu")(hidden)
        if side < 4:
            break
        hidden = layers.MaxPooling2D()(hidden)
        side, filters = side // 2, min(2 * filters, 128)
        if side <= 6:
            break
    hidden = layers.Flatten()(hidden) if max(height, width) < 64 else layers.GlobalAveragePooling2D()(hidden)
    hidden = layers.Dropout(0.5)(hidden)
    hidden = layers.Dense(64, activation="relu")(hidden)
    return keras.Model(inputs, _end(hidden, units, classify), name="cnn")


def _image(spec: str, shape: Shape) -> tuple[int, int]:
    if len(shape) != 3:
        raise ModelError(f"{spec} needs images (height, width, channels), these samples have shape {shape}: use mlp")
    height, width, _ = shape
    return int(height or 0), int(width or 0)


def _application(spec: str, beginning: Beginning, units: int, classify: bool) -> keras.Model:
    """A model of `keras.applications`; images smaller than it can take are enlarged in its first layer."""
    maker = getattr(keras.applications, spec, None)
    if not inspect.isfunction(maker):
        raise ModelError(f"there is no model {spec!r}: name {KINDS}")
    shape = beginning.shape
    height, width = _image(spec, shape)
    options: dict[str, Any] = {"weights": None, "classes": units, "classifier_activation": None}
    if "include_preprocessing" in inspect.signature(maker).parameters:
        options["include_preprocessing"] = False
    try:
        least = _smallest(maker, shape)
        size = (max(height, least), max(width, least))
        if spec.startswith("NASNet") or spec == "MobileNet":
            options["input_shape"] = (*size, shape[2])
        inputs, hidden = beginning.layers()
        if size != (height, width):
            hidden = _resized(hidden, size)
        if spec.startswith("EfficientNetB"):
            hidden = keras.layers.Rescaling(255.0)(hidden)  # it divides by 255 itself
        model = maker(input_tensor=hidden, **options)
    except (ValueError, TypeError) as error:
        reason = in_one_line(error)
        raise ModelError(
            f"{spec} cannot be built for samples of shape {shape} ({reason}): use cnn, or other images"
        ) from error
    activation = keras.layers.Activation("softmax" if classify else "linear", dtype="float32", name="output")
    return keras.Model(inputs, activation(model.output), name=spec.lower())


def _smallest(maker: Callable[..., Any], shape: Shape) -> int:
    """The least height and width of an image, which Keras tells only by refusing smaller ones."""
    try:
        maker(weights=None, include_top=False, input_shape=(1, 1, shape[2]))
    except ValueError as error:
        found = SMALLEST.search(str(error))
        return int(found.group(1)) if found else 32
    return 32
