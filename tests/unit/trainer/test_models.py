"""Models by name, from files and from functions; and whether they fit the labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from mpitrain.data.image_decoding import Form, decode
from mpitrain.data.load import load
from mpitrain.data.source import DataSource, Preprocessing
from mpitrain.errors import ModelError
from mpitrain.trainer.models import build
from mpitrain.trainer.objective import check_compiled, check_fits, objective

MODULE = """
import keras

def whole(input_shape, num_classes, seed):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes + seed)])

def any(**arguments):
    assert set(arguments) == {"input_shape", "num_classes", "seed"}
    return whole(**arguments)

def bare():
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])

def layer():
    return keras.layers.Dense(3)

def breaks():
    raise RuntimeError("no model today")
"""


def made(spec: str, shape: tuple[int | None, ...] = (8, 8, 1), classes: int | None = 3, **options: Any) -> keras.Model:
    return build(spec, input_shape=shape, num_classes=classes, **{"seed": 0, **options})


def source(
    shape: tuple[int, ...] = (8, 8, 1), classes: int | None = 3, label_shape: tuple[int, ...] = ()
) -> DataSource:
    dtype = np.int64 if classes else np.float32
    train = tf.data.Dataset.from_tensors((np.zeros(shape, np.float32), np.zeros(label_shape, dtype)))
    return DataSource(train, None, None, 1, 0, 0, classes, "one sample")


def ending(*layers: Any) -> keras.Model:
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


@pytest.mark.parametrize("shape", [(8, 8, 1), (3, 5, 3), (1, 1, 1), (28, 28, 1), (70, 64, 3)])
def test_cnn_takes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    model = made("cnn", shape)
    assert model.output_shape == (None, 3)
    assert model.count_params() < 700_000
    check_fits(model, source(shape))
    assert objective(model, source(shape)).kind == "probabilities"


@pytest.mark.parametrize("shape", [(5,), (4, 4, 3)])
def test_mlp_takes_rows_and_images(shape: tuple[int, ...]) -> None:
    check_fits(made("mlp", shape), source(shape))
    check_fits(made("mlp", shape, None, outputs=2), source(shape, None, (2,)))


@pytest.mark.parametrize("spec", ["cnn", "mlp"])
def test_the_seed_alone_decides_the_weights(spec: str) -> None:
    def weights(seed: int) -> list[bytes]:
        return [np.asarray(weight).tobytes() for weight in made(spec, seed=seed).get_weights()]

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


def test_the_output_is_float32_in_mixed_precision() -> None:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        for spec in ("cnn", "mlp"):
            model = made(spec)
            assert model(np.zeros((1, 8, 8, 1))).dtype == tf.float32
            assert objective(model, source()).kind == "probabilities"
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    ("spec", "side"), [("MobileNetV2", 32), ("MobileNet", 32), ("EfficientNetB0", 32), ("Xception", 71)]
)
def test_applications_enlarge_small_grey_images(spec: str, side: int) -> None:
    model = made(spec, (8, 8, 1))
    assert model.input_shape == (None, 8, 8, 1)
    assert next(layer for layer in model.layers if isinstance(layer, keras.layers.Resizing)).height == side
    check_fits(model, source())
    assert objective(model, source()).kind == "probabilities"


def test_applications_leave_large_images_alone() -> None:
    model = made("MobileNetV3Small", (64, 48, 3), None)
    assert not any(isinstance(layer, (keras.layers.Resizing, keras.layers.Rescaling)) for layer in model.layers)
    check_fits(model, source((64, 48, 3), None))


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("cnn", (5,), "use mlp"),
        ("MobileNetV2", (5,), "use mlp"),
        ("cnn", (None, None, 3), "one fixed shape"),
        ("resnet", (8, 8, 1), "no model 'resnet'"),
        ("backend", (8, 8, 1), "no model 'backend'"),
        ("resnet50", (8, 8, 1), "no model 'resnet50'"),
        ("nowhere.keras", (8, 8, 1), "no model file nowhere.keras"),
    ],
)
def test_names_refused(spec: str, shape: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        made(spec, shape)


def test_saved_models_are_loaded(tmp_path: Path) -> None:
    model = made("cnn", seed=4)
    model.save(tmp_path / "a.keras")
    again = made(str(tmp_path / "a.keras"))
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), again.get_weights(), strict=True))
    assert objective(again, source()).kind == "probabilities"
    data = (tmp_path / "a.keras").read_bytes()
    for damaged in (b"", b"words", data[:1000]):
        (tmp_path / "a.keras").write_bytes(damaged)
        why = r"cannot be loaded as a Keras model \(it is none that Keras has written, or cut off\)"
        with pytest.raises(ModelError, match=why) as caught:
            made(str(tmp_path / "a.keras"))
        assert "\n" not in str(caught.value)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "models_of_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("name", ["whole", "any", "bare"])
def test_functions_are_given_what_they_ask_for(module: str, name: str) -> None:
    model = made(f"{module}:{name}")
    check_fits(model, source())
    assert model.built


@pytest.mark.parametrize(
    ("name", "message"),
    [("layer", "returns a Dense"), ("breaks", "no model today"), ("missing", "no function 'missing'")],
)
def test_functions_refused(module: str, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        made(f"{module}:{name}")


@pytest.mark.parametrize(
    ("layers", "data", "message"),
    [
        ([keras.layers.Dense(2)], source(), "2 outputs, but the labels are of 3 classes"),
        ([keras.layers.Dense(1)], source(), "1 output, but the labels are of 3 classes"),
        ([keras.layers.Dense(1, activation="softmax")], source(classes=2), "1 output"),
        ([keras.layers.Reshape((8, 8))], source(), r"shape \(8, 8\)"),
        ([keras.layers.Dense(3)], source((4, 4, 1)), "does not take samples of shape"),
        ([keras.layers.Dense(3)], source(classes=None), "give its last layer 1 units"),
        ([keras.layers.Dense(1)], source(classes=None, label_shape=(2,)), "give its last layer 2 units"),
    ],
)
def test_models_that_do_not_fit_refused(layers: list[Any], data: DataSource, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        check_fits(ending(*layers), data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "classes", "message"),
    [
        ("sparse_categorical_crossentropy", 3, None),
        ("mse", None, None),
        ("categorical_crossentropy", 3, "does not take labels that are class numbers, one a sample .*rank"),
        (None, 3, "No loss to compute"),
    ],
)
def test_the_loss_that_a_model_is_compiled_with(loss: str | None, classes: int | None, message: str | None) -> None:
    model = ending(keras.layers.Dense(classes or 1))
    model.compile("sgd", loss)
    if message is None:
        check_compiled(model, source(classes=classes))
        return
    with pytest.raises(ModelError, match=message) as caught:
        check_compiled(model, source(classes=classes))
    assert "\n" not in str(caught.value)


def test_two_outputs_refused() -> None:
    inputs = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(3)(flat), keras.layers.Dense(3)(flat)])
    with pytest.raises(ModelError, match="2 outputs, but each sample one label"):
        check_fits(model, source())


@pytest.mark.parametrize(
    ("layers", "classes", "kind"),
    [
        ([keras.layers.Dense(3, activation="softmax")], 3, "probabilities"),
        ([keras.layers.Dense(3), keras.layers.Softmax()], 3, "probabilities"),
        ([keras.Sequential([keras.layers.Dense(3, activation="softmax")])], 3, "probabilities"),
        ([keras.layers.Dense(3)], 3, "logits"),
        ([keras.layers.Dense(7)], 3, "logits"),
        ([keras.layers.Dense(1, activation="sigmoid")], 2, "binary probability"),
        ([keras.layers.Dense(1)], 2, "binary logit"),
        ([keras.layers.Dense(1)], None, "regression"),
    ],
)
def test_loss_follows_from_the_output(layers: list[Any], classes: int | None, kind: str) -> None:
    model, data = ending(*layers), source(classes=classes)
    check_fits(model, data)
    found = objective(model, data)
    assert found.kind == kind
    label = 1.0 if classes is None else 1
    model.compile("sgd", found.loss, metrics=found.metrics)
    loss, metric = model.evaluate(np.ones((4, 8, 8, 1), np.float32), np.full(4, label), verbose=0)
    output = np.asarray(model(np.ones((1, 8, 8, 1), np.float32)), np.float64)[0]
    if kind == "logits":
        output = np.exp(output) / np.exp(output).sum()
    elif kind == "binary logit":
        output = 1 / (1 + np.exp(-output))
    if kind == "regression":
        assert loss == pytest.approx((1 - output[0]) ** 2, rel=1e-4)
    else:
        chance = output[0] if output.shape == (1,) else output[1]
        assert loss == pytest.approx(-np.log(chance), rel=1e-3)
        assert metric == float(output[0] > 0.5 if output.shape == (1,) else output.argmax() == 1)


def test_activations_that_layers_do_not_tell_are_seen_in_the_output() -> None:
    class Own(keras.Model):
        def __init__(self, activation: str | None) -> None:
            super().__init__()
            self.parts = [keras.layers.Flatten(), keras.layers.Dense(3, activation=activation)]

        def call(self, inputs: Any) -> Any:
            return self.parts[1](self.parts[0](inputs))

    assert objective(Own("softmax"), source()).kind == "probabilities"
    assert objective(Own(None), source()).kind == "logits"


@pytest.mark.parametrize(
    ("spec", "precision"), [("cnn", "float32"), ("mlp", "mixed_float16"), ("MobileNetV2", "float32")]
)
def test_saved_models_take_pictures_as_they_are(tmp_path: Path, spec: str, precision: str) -> None:
    """Of any size, with 16 bits: the loaded model gives what the training saw of the brought and scaled picture."""
    picture = np.random.default_rng(0).integers(0, 65536, (50, 40, 3), dtype=np.uint16)
    data = tf.io.encode_png(picture)
    common = Form((32, 34, 3), 16, True)
    keras.mixed_precision.set_global_policy(precision)
    try:
        trained = made(spec, common.shape, preprocessing=Preprocessing(65535.0, (32, 34)))
        bare = made(spec, common.shape)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    bare.set_weights(trained.get_weights())
    decoded = decode(data, common)[tf.newaxis]
    trained.save(tmp_path / "a.keras")
    found = keras.models.load_model(tmp_path / "a.keras")(picture[np.newaxis].astype(np.float32))
    np.testing.assert_array_equal(found, trained(decoded))
    np.testing.assert_allclose(found, bare(decoded / 65535), rtol=1e-2 if precision == "mixed_float16" else 1e-5)


def test_the_default_model_learns_the_digits_as_scikit_learn_has_them(tmp_path: Path) -> None:
    digits = load("digits", validation_split=0.1, seed=0, rank=0, size=1)
    preprocessing = digits.meaning.preprocessing
    model = build(
        "cnn", input_shape=digits.input_shape, num_classes=digits.num_classes, seed=0, preprocessing=preprocessing
    )
    check_fits(model, digits)
    found = objective(model, digits)
    model.compile(keras.optimizers.Adam(3e-3), found.loss, metrics=found.metrics)
    model.fit(digits.train.batch(128), epochs=6, shuffle=False, verbose=0)
    assert digits.test is not None
    assert model.evaluate(digits.test.batch(360), verbose=0)[1] > 0.93
    model.save(tmp_path / "a.keras")
    values, classes = load_digits(return_X_y=True)
    found = keras.models.load_model(tmp_path / "a.keras").predict(values.reshape(-1, 8, 8, 1), verbose=0).argmax(-1)
    assert (found == classes).mean() > 0.93
