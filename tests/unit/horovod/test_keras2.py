"""Words of Keras 2 mean what they meant."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from mpitrain.horovod import keras2, session_threads

v1 = tf.compat.v1


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test."""
    optimizers = keras.optimizers
    names = ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD")
    legacy = [(one.legacy, name) for one in (optimizers, tf.keras.optimizers) for name in names]
    backend = [(one.backend, name) for one in (keras, tf.keras) for name in ("get_value", "set_value")]
    of_classes = [(keras2._owner(optimizers.Optimizer, "variables"), "variables"), (optimizers.Optimizer, "lr")]
    of_classes += [(optimizers.LossScaleOptimizer, "variables"), (keras2._owner(keras.Model, "compile"), "compile")]
    for owner, name in (*legacy, *backend, *of_classes, (v1.Session, "__init__")):
        monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)  # put back what is there now
    keras2.install.__wrapped__()
    session_threads.install.__wrapped__()


@pytest.mark.usefixtures("_installed")
def test_optimizers() -> None:
    made = keras.optimizers.legacy.Adam(0.5)
    assert type(made) is keras.optimizers.Adam is tf.keras.optimizers.legacy.Adam
    made.build([keras.Variable(1.0)])
    assert [v.path for v in made.variables()] == [v.path for v in made.variables]
    scaled = keras.optimizers.LossScaleOptimizer(made)
    scaled.build([keras.Variable(1.0)])
    assert len(scaled.variables()) == len(scaled.variables) > len(made.variables) > 2
    made.lr = 0.25
    assert float(made.lr.numpy()) == float(made.learning_rate.numpy()) == 0.25


@pytest.mark.usefixtures("_installed")
def test_values_and_compile() -> None:
    variable = keras.Variable([1.0])
    keras.backend.set_value(variable, [2.0])
    assert keras.backend.get_value(variable).tolist() == [2.0]
    assert tf.keras.backend.get_value(3) == 3
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", experimental_run_tf_function=False)
    assert model.compiled
    with pytest.raises(TypeError, match="unknown"):
        model.compile("sgd", "mse", unknown=1)


@pytest.mark.usefixtures("_installed")
def test_threads_of_sessions() -> None:
    def threads(**options: Any) -> int:
        with v1.Session(graph=tf.Graph(), **options) as session:
            return int(session._config.inter_op_parallelism_threads)

    config = v1.ConfigProto(allow_soft_placement=True)
    assert threads() == threads(config=config) == session_threads.THREADS
    assert threads(config=v1.ConfigProto(inter_op_parallelism_threads=3)) == 3
    assert not config.inter_op_parallelism_threads, "the script's own stays as it was"
