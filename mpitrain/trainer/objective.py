"""Does a model's output fit the labels, and which loss and metrics follow?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np

from mpitrain.data.source import DataSource
from mpitrain.errors import ModelError, UsageError, in_one_line
from mpitrain.runtime import keras_private
from mpitrain.runtime.counted import counted

Kind = Literal["probabilities", "logits", "binary probability", "binary logit", "regression"]


@dataclass(frozen=True)
class Objective:
    """What to give to `compile`: what the output is, its loss, and fresh metrics."""

    kind: Kind
    loss: keras.losses.Loss
    metrics: list[keras.metrics.Metric]


def check_fits(model: keras.Model, source: DataSource) -> None:
    """Local: run the model once, which also builds it, and compare its output with the labels.

    Raises:
        ModelError: the model does not take such samples, or its output does not fit the labels.
    """
    shape = tuple(_output(model, source).shape[1:])
    if source.num_classes is None:
        wanted = source.label_shape or (1,)
        if shape not in (wanted, source.label_shape):
            raise ModelError(
                f"the model's output has shape {shape} for each sample, the values to predict have "
                f"{wanted}: give its last layer {wanted[0]} units"
            )
        return
    if len(shape) != 1:
        raise ModelError(
            f"the model's output has shape {shape} for each sample, but the labels are one class number "
            f"each: end it in Flatten or pooling and a Dense layer of {source.num_classes} units"
        )
    binary = shape == (1,) and source.num_classes == 2 and _activation(model) != "softmax"
    if shape[0] < source.num_classes and not binary:
        raise ModelError(
            f"the model has {counted(shape[0], 'output')}, but the labels are of "
            f"{counted(source.num_classes, 'class')} (0 to "
            f"{source.num_classes - 1}): give its last layer {source.num_classes} units"
        )


def objective(model: keras.Model, source: DataSource) -> Objective:
    """Local: loss and metrics for a model that `check_fits`.

    Class numbers want a cross-entropy: sparse for several outputs, binary for a single one; whether the
    outputs are probabilities is told from the last layer's activation, or, where that is not known, from an
    output itself. A regression wants the mean squared error.
    """
    if source.num_classes is None:
        metric = keras.metrics.MeanAbsoluteError(name="mae")
        return Objective("regression", keras.losses.MeanSquaredError(), [metric])
    output = _output(model, source)
    activation = _activation(model) or ("softmax" if _looks_like_probabilities(output) else "linear")
    logits = activation not in ("softmax", "sigmoid")
    if output.shape[1:] == (1,) and activation != "softmax":
        loss = keras.losses.BinaryCrossentropy(from_logits=logits)
        accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0 if logits else 0.5)
        return Objective("binary logit" if logits else "binary probability", loss, [accuracy])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    return Objective("logits" if logits else "probabilities", loss, [accuracy])


def check_compiled(model: keras.Model, source: DataSource) -> None:
    """Local: whether a model that was compiled by its user can be trained so: the loss takes such labels.

    Raises:
        ModelError: it cannot.
    """
    if type(model).train_step is not keras.Model.train_step:
        return  # it may use its loss in its own way
    output = _output(model, source)
    dtype = np.float32 if source.num_classes is None else np.int64
    labels = np.zeros((len(output), *(length or 1 for length in source.label_shape)), dtype)
    try:
        model.compute_loss(x=None, y=labels, y_pred=keras.ops.convert_to_tensor(output), training=False)
    except Exception as error:  # of Keras, or of the user's loss
        reason = in_one_line(error)
        what = "values" if source.num_classes is None else "class numbers, one a sample"
        raise ModelError(
            f"the loss that the model is compiled with does not take labels that are {what} ({reason}): compile it "
            "with another, or not at all"
        ) from error


def check_best(best: str | None, metrics: Sequence[Any], source: DataSource) -> None:
    """Local: whether there will be a number of that name.

    Raises:
        UsageError: there will not.
    """
    names = ["loss", *(str(getattr(metric, "name", metric)) for metric in metrics)]
    names += [f"val_{name}" for name in names] if source.validation is not None else []
    if best is not None and best not in names:
        raise UsageError(f"--checkpoint-best {best}: there is no such number, only {', '.join(names)}: name one")


def _output(model: keras.Model, source: DataSource) -> np.ndarray[Any, Any]:
    if None in source.input_shape:
        shape = tuple(32 if length is None else length for length in source.input_shape)
    else:
        shape = tuple(length or 0 for length in source.input_shape)
    # The same on all ranks, which choose loss and metrics by what comes out.
    sample = np.random.default_rng(0).random((2, *shape), np.float32)
    try:
        output = model(sample, training=False)
    except Exception as error:  # ValueError, InvalidArgumentError, or anything from the user's layers
        reason = in_one_line(error)
        raise ModelError(
            f"the model does not take samples of shape {source.input_shape} ({reason}): "
            "give it such an input, or other data"
        ) from error
    if isinstance(output, (list, tuple, dict)):
        raise ModelError(f"the model has {len(output)} outputs, but each sample one label: give the model one output")
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(output, "float32")))


def _activation(model: keras.Model) -> str | None:
    """Name of the activation that gives the output; None where the layers do not tell."""
    tensors = getattr(model, "outputs", None)
    layer = keras_private.output_layer(tensors[0]) if tensors else None
    if isinstance(layer, keras.Model):
        return _activation(layer)
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None)
    if activation is None:
        return "linear" if isinstance(layer, keras.layers.Dense) else None
    return str(getattr(activation, "__name__", "")) or None


def _looks_like_probabilities(output: np.ndarray[Any, Any]) -> bool:
    if output.shape[1:] == (1,):
        return bool(((output > 0) & (output < 1)).all())
    return bool((output >= 0).all() and np.allclose(output.sum(axis=1), 1, atol=1e-2))
