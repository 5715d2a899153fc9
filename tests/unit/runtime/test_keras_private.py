"""What stands behind the door to Keras' private names: it is there in the Keras that is installed, as it is used.

A Keras that has changed one of them fails here, in a line that names it.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.faults import stacks
from mpitrain.runtime import keras_private
from mpitrain.runtime.keras_private import ArrayDataAdapter, DataAdapter, PyDatasetAdapter, TFDatasetAdapter

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
# How each function is called, be it by mpitrain or, where it is replaced, by Keras.
SIGNATURES: dict[str, tuple[Any, str]] = {
    "reduce_weighted_values": (
        getattr(keras_private.loss, keras_private.REDUCTION),
        "values sample_weight mask reduction dtype",
    ),
    "apply_mask": (keras_private.loss.apply_mask, "sample_weight mask dtype reduction"),
    "squeeze_or_expand_to_same_rank": (keras_private.loss.squeeze_or_expand_to_same_rank, "x1 x2"),
    "BatchNormalization._moments": (
        getattr(keras.layers.BatchNormalization, keras_private.MOMENTS),
        "self inputs mask",
    ),
    "Layer._get_own_losses": (getattr(keras.layers.Layer, keras_private.OWN_LOSSES), "self"),
    "Layer._get_regularization_losses": (getattr(keras.layers.Layer, keras_private.REGULARIZATION), "self"),
    "Optimizer._clip_gradients": (getattr(keras.optimizers.Optimizer, keras_private.CLIP_GRADIENTS), "self grads"),
    "Model._get_metrics_result_or_logs": (getattr(keras.Model, keras_private.LOGS_OF_EPOCH), "self logs"),
    "Model._flatten_metrics_in_order": (keras.Model._flatten_metrics_in_order, "self logs"),
    "Model._symbolic_build": (keras.Model._symbolic_build, "self iterator data_batch"),
    "BackupAndRestore._save_model": (
        getattr(keras.callbacks.BackupAndRestore, keras_private.SAVE_OF_BACKUP),
        "self",
    ),
    "get_data_adapter": (
        keras_private.get_data_adapter,
        "x y sample_weight batch_size steps_per_epoch shuffle class_weight",
    ),
    "train_validation_split": (keras_private.hold_out, "arrays validation_split"),
    "convert_to_sliceable": (keras_private.sliceable, "arrays target_backend"),
    "class_weight_to_sample_weights": (keras_private.class_weight_to_sample_weights, "y class_weight"),
    "file_utils.makedirs": (keras_private.file_utils.makedirs, "path"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_are_called_as_they_want(name: str) -> None:
    function, wanted = SIGNATURES[name]
    assert " ".join(inspect.signature(function).parameters).startswith(wanted)


def compiled(**options: Any) -> Any:
    inputs = keras.Input((2,))
    hidden = keras.layers.BatchNormalization(name="norm")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b")])
    losses = [keras.losses.MeanSquaredError(reduction="sum"), "mae"]
    model.compile(loss=losses, metrics=[["mae"], []], **{"optimizer": "sgd", **options})
    return model


def test_adapters() -> None:
    for data in (X, tf.data.Dataset.from_tensors(X), (batch for batch in [(X,)])):
        assert isinstance(keras_private.get_data_adapter(x=data), DataAdapter)
    made = ArrayDataAdapter(X, Y, batch_size=4, shuffle=True)
    (arrays, targets), count, shuffle = keras_private.arrays_of(made)
    assert arrays is X
    assert targets is Y
    assert (count, shuffle, made.batch_size, made.partial_batch_size, made.num_batches) == (6, True, 4, 2, 2)
    assert keras_private.get_data_adapter(x=made) is made  # so that `fit` takes one in the place of data
    assert TFDatasetAdapter(tf.data.Dataset.from_tensors(X)).num_batches == 1


def test_rows_of_what_is_sliceable() -> None:
    dense, sparse = keras_private.sliceable((X, tf.sparse.from_dense(X)), target_backend="tensorflow")
    assert dense is not None
    assert isinstance(sparse, keras_private.SparseRows)
    rows = tf.sparse.to_dense(keras_private.take_sparse_rows(sparse, tf.constant([4, 1])))
    assert rows.numpy().tolist() == X[[4, 1]].tolist()


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return X[index : index + 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pass_over_a_py_dataset_begins_once_an_epoch(workers: int) -> None:
    begun: list[int] = []

    class Passes(keras_private.PyDatasetPasses):
        def begin_pass(self) -> None:
            begun.append(1)

    passes = Passes(Batches(workers=workers), None)
    assert isinstance(passes, PyDatasetAdapter)
    for epoch in range(1, 3):
        passes.on_epoch_begin()
        assert sum(1 for _ in passes.get_tf_dataset()) == 2
        passes.on_epoch_end()
        assert len(begun) == epoch


def test_optimizers() -> None:
    variable, bias = keras.Variable([1.0]), keras.Variable([2.0, 2.0])
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9, weight_decay=0.1, gradient_accumulation_steps=2)
    assert keras_private.accumulated_gradients(optimizer) == []
    optimizer.exclude_from_weight_decay(var_list=[bias])
    optimizer.build([variable, bias])
    assert [tuple(one.shape) for one in keras_private.accumulated_gradients(optimizer)] == [(1,), (2,)]
    assert keras_private.trained_variables(optimizer) == [variable, bias]
    assert [keras_private.decays(optimizer, one) for one in (variable, bias)] == [True, False]
    (momentum, accumulated) = keras_private.slots_of(optimizer, lambda one: one is bias)
    assert {tuple(momentum.shape), tuple(accumulated.shape)} == {(2,)}
    optimizer.apply([tf.ones(1), tf.ones(2)])
    assert int(keras_private.step_counter(optimizer).numpy()) == 1
    assert int(optimizer.iterations) == 0
    assert float(keras_private.learning_rate(optimizer).numpy()) == 0.5
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    assert keras_private.learning_rate(keras.optimizers.SGD(schedule)) is schedule


def test_accumulated_gradients_are_clipped_once_per_update() -> None:
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    seen: list[float] = []
    clip = getattr(optimizer, keras_private.CLIP_GRADIENTS)

    def noting(grads: Any) -> Any:
        seen.extend(float(grad[0]) for grad in grads)
        return clip(grads)

    object.__setattr__(optimizer, keras_private.CLIP_GRADIENTS, noting)
    variable = keras.Variable([0.0])
    for number in (1.0, 3.0):
        optimizer.apply([tf.constant([number])], [variable])
    assert seen[-1] == 2.0
    assert float(variable.numpy()[0]) == -2.0


def test_a_divided_learning_rate() -> None:
    variable, divisor = keras.Variable([0.0]), tf.Variable(4.0)
    optimizer = keras.optimizers.SGD(1.0)
    keras_private.divide_learning_rate(optimizer, divisor)
    optimizer.apply([tf.ones(1)], [variable])
    assert float(variable.numpy()[0]) == -0.25


def test_models() -> None:
    model = compiled()
    assert keras_private.trackers_of_outputs(keras.Model()) == keras_private.losses_of_outputs(keras.Model()) == []
    keras_private.build_for(model, (X, (Y, Y)))
    assert [one.reduction for one in keras_private.losses_of_outputs(model)] == ["sum", "sum_over_batch_size"]
    assert [one.name for one in keras_private.trackers_of_outputs(model)] == ["a_loss", "b_loss"]
    assert keras_private.output_layer(model.outputs[0]).name == "a"
    layers = keras_private.layers_within(keras.Sequential([model]))
    assert {layer.name for layer in layers} >= {"norm", "a", "b"}
    assert keras_private.normalized_axes(model.get_layer("norm")) == [0]
    logs = model.train_on_batch(X, [Y, Y], return_dict=True)
    numbers = keras_private.numbers_in_order(model, logs)
    assert numbers[0] == logs["loss"]
    assert sorted(numbers) == sorted(logs.values())
    assert getattr(model, keras_private.LOGS_OF_EPOCH)(logs).keys() == logs.keys()


def test_where_a_fit_begins_and_that_it_calls_evaluate() -> None:
    calls: list[dict[str, Any]] = []

    class Model(keras.Sequential):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs)
            return super().evaluate(*args, **kwargs)

    model = Model([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: keras_private.set_initial_epoch(model, 2))
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[begin], validation_data=(X, Y))
    assert history.epoch == [2]
    assert [keras_private.CALLED_BY_FIT in call for call in calls] == [True]


def test_moments_of_a_subclass() -> None:
    class Zero(keras_private.BatchNormalizationByMoments):
        def moments(self, inputs: Any, mask: Any) -> Any:
            mean, variance = super().moments(inputs, mask)
            return mean * 0.0, variance * 0.0 + 1.0

    assert np.allclose(Zero(epsilon=0.0)(X, training=True), X)


def test_metrics_and_losses() -> None:
    metric = keras.metrics.MeanMetricWrapper(fn=lambda y, p: y - p)
    assert float(keras_private.function_of(metric)(3.0, 1.0)) == 2.0
    with keras_private.computing_by(metric, lambda y, p: y + p):
        metric.update_state(tf.constant([3.0]), tf.constant([1.0]))
    assert float(metric.result()) == 4.0
    metric.update_state(tf.constant([1.0]), tf.constant([1.0]))
    assert float(metric.result()) == 2.0
    assert keras_private.variables_of(metric) == metric.variables
    values, mask = tf.ones((2, 2)), tf.constant([[True, True], [True, False]])
    weights = tf.constant([[1.0, 1.0], [3.0, 3.0]])
    weight = keras_private.weight_with_mask(values, weights, mask, "mean_with_sample_weight")
    assert weight.numpy().tolist() == [[1.0, 1.0], [3.0, 0.0]]
    assert keras_private.weight_with_mask(values, None, None, "mean_with_sample_weight") is None
    assert keras_private.get_keras_mask(values) is None
    keras_private.set_keras_mask(values, mask)
    assert keras_private.get_keras_mask(values) is mask


def test_keras_finds_what_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    for owner, name in (
        (keras_private.loss, keras_private.REDUCTION),
        (keras.layers.BatchNormalization, keras_private.MOMENTS),
        (keras.layers.Layer, keras_private.OWN_LOSSES),
        (keras.layers.Layer, keras_private.REGULARIZATION),
        (keras_private.file_utils, "makedirs"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it is put back

        def noted(original: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        keras_private.patch(owner, name, noted)
    keras.losses.MeanSquaredError()(X, X)
    keras.layers.BatchNormalization()(X, training=True)
    assert not keras.Sequential().losses
    keras_private.file_utils.makedirs(str(tmp_path / "folder"))
    of_layers = {keras_private.MOMENTS, keras_private.OWN_LOSSES, keras_private.REGULARIZATION}
    assert set(calls) == {keras_private.REDUCTION, *of_layers, "makedirs"}


def test_variables_and_random_numbers() -> None:
    variable = keras.Variable([1.0])
    assert keras_private.bare(variable) is variable.value
    assert not keras_private.in_stateless_scope()
    with keras.StatelessScope():
        assert keras_private.in_stateless_scope()
    keras.utils.clear_session()
    assert keras_private.seed_generator(make=False) is None
    keras.random.normal((1,))
    assert keras_private.seed_generator(make=False) is keras_private.seed_generator(make=True)
    assert keras_private.seed_generator(make=True).state.shape == (2,)


def test_a_model_is_saved_within_a_stateless_scope(tmp_path: Path) -> None:
    model = compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    keras.utils.clear_session()
    keras_private.keep_reference_objects()
    with keras.StatelessScope([(variable, variable.value) for variable in model.variables]):
        model.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").optimizer.inner_optimizer.name == "adam"


def test_callbacks() -> None:
    callback = keras.callbacks.EarlyStopping()
    assert keras_private.is_default(callback.on_train_batch_end)
    assert not keras_private.is_default(callback.on_epoch_end)
    callbacks = keras.callbacks.CallbackList([callback])
    keras_private.call_at_once(callbacks)
    assert all(name in vars(callbacks) for name in ("_async_train", "_async_test"))


def test_packages_have_the_modules_that_scripts_find_functions_in() -> None:
    public, of_tensorflow = (importlib.import_module(f"{package}.saving") for package in keras_private.PACKAGES)
    assert of_tensorflow is sys.modules[tf.keras.saving.__name__]
    assert public.load_model is of_tensorflow.load_model


def test_places_in_keras_that_stacks_are_read_by() -> None:
    root = Path(inspect.getfile(keras)).parents[1]
    places = [mark.path for mark in stacks._MARKS if mark.path.startswith("keras/")]
    places += [place.strip("/") for place in stacks.INTERNAL if place.startswith("/keras/")]
    assert len(places) == 4
    assert [place for place in places if not (root / place).exists()] == []


def test_a_keras_that_keeps_a_name_elsewhere_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("keras.src.saving.saving_lib.get_attr_skipset")
    with pytest.raises(UsageError, match=f"does not know this Keras, {keras.__version__}: .*'get_attr_skipset'"):
        runpy.run_path(str(keras_private.__file__))
