"""The models that are timed, on synthetic data, in a training step as a user would write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MODELS = ("mlp50k", "mlp14m", "resnet50", "vgg16")
PARAMETERS = {"mlp50k": 50_890, "mlp14m": 14_217_226, "resnet50": 25_636_712, "vgg16": 43_985_704}
IMAGE = (64, 64, 3)
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Workload:
    """A model with a batch that fits it."""

    name: str  # one of MODELS
    model: Any  # a Keras model whose output are logits
    inputs: Any  # one batch
    labels: Any  # of that batch, integers


def workload(name: str, batch_size: int, seed: int) -> Workload:
    """Local: build a model; the same weights on all ranks, and data from `seed`.

    The image models keep the 1000 classes of their publication: it is with these that ResNet-50 has
    25.6 and VGG-16, at 64x64, 44 million parameters.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    model = _build(name)
    random = np.random.default_rng(seed)
    inputs = random.random((batch_size, *model.input_shape[1:]), np.float32)
    labels = random.integers(0, model.output_shape[-1], batch_size)
    return Workload(name, model, tf.constant(inputs), tf.constant(labels))


def optimizer() -> Any:
    """Local: plain SGD, because its own work is the least: what is compared is the exchange."""
    import keras

    return keras.optimizers.SGD(LEARNING_RATE)


def train_step(
    load: Workload, update: Any, reduce: Callable[[Sequence[Any]], Sequence[Any]] | None = None
) -> Callable[[], float]:
    """Local: a step of training as one `tf.function`; calling it returns the loss as a float.

    With `reduce` peers average gradients before the optimizer sees them.
    """
    import tensorflow as tf

    variables = load.model.trainable_variables
    update.build(variables)

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        loss, gradients = loss_and_gradients(load.model, inputs, labels)
        update.apply(gradients if reduce is None else reduce(gradients), variables)
        return loss

    return lambda: float(step(load.inputs, load.labels))


def loss_and_gradients(model: Any, inputs: Any, labels: Any, scale: float = 1.0) -> tuple[Any, Any]:
    """Local: `scale` times the mean loss of a batch, and its gradients."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses) * scale
    return loss, tape.gradient(loss, model.trainable_variables)


def _build(name: str) -> Any:
    import keras

    options = {"weights": None, "input_shape": IMAGE, "classifier_activation": None}
    if name == "resnet50":
        return keras.applications.ResNet50(**options)
    if name == "vgg16":
        return keras.applications.VGG16(**options)
    hidden = {"mlp50k": (64,), "mlp14m": (2048,) * 4}[name]
    layers = [keras.layers.Dense(units, activation="relu") for units in hidden]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
