"""What servers are told of an optimizer, and what they cannot do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.strategies.parameter_server.client import Client
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import Roles
from mpitrain.strategies.parameter_server.setup import described, refuse, setup_for


def client(**options: Any) -> Client:
    """As far as it is asked here."""
    made = SimpleNamespace(options=ServerOptions(**options), hosts=1, roles=Roles((0, 1), (2,)))
    return cast(Client, made)


def setup(optimizer: Any, *variables: Any, sparse: bool = False, **options: Any) -> dict[str, Any]:
    optimizer.build(variables)
    gradients: list[Any] = [tf.zeros(v.shape, v.dtype) for v in variables]
    if sparse:
        gradients[0] = tf.IndexedSlices(gradients[0][:1], tf.constant([0]), tf.constant(variables[0].shape))
    return setup_for(optimizer, "of a test", gradients, variables, client(**options))


def variable(dtype: str = "float32", **options: Any) -> Any:
    made = keras.Variable(np.zeros((4, 2)), dtype=dtype, name="v")
    for name, value in options.items():
        setattr(made, name, value)
    return made


def test_what_all_have_in_common() -> None:
    told = setup(keras.optimizers.SGD(0.5, clipnorm=2.0), variable())
    assert told["specs"] == [["v", [4, 2], "float32", False]]
    assert told["optimizer"]["config"]["learning_rate"] == 0.0  # it travels with each gradient
    assert (told["clipnorm"], told["whole"], told["constraints"]) == (2.0, [], [None])
    assert told["digest"] == setup(keras.optimizers.SGD(0.25, clipnorm=2.0), variable())["digest"]
    assert told["digest"] != setup(keras.optimizers.SGD(0.5, clipnorm=3.0), variable())["digest"]
    assert setup(keras.optimizers.SGD(clipnorm=2.0), variable(), mode="async")["clipnorm"] is None


def test_what_looks_at_whole_variables_is_not_split() -> None:
    assert setup(keras.optimizers.Adafactor(), variable())["whole"] == [0]
    held = setup(keras.optimizers.SGD(), variable(constraint=keras.constraints.NonNeg()))
    assert held["whole"] == [0]
    assert held["constraints"][0]["class_name"] == "NonNeg"


def test_what_servers_cannot_host_is_told() -> None:
    with pytest.raises(UsageError, match="v is float16 with gradients of float16"):
        setup(keras.optimizers.SGD(), variable("float16"))
    with pytest.raises(UsageError, match="v has a constraint, and its gradients are rows"):
        setup(keras.optimizers.SGD(), variable(constraint=keras.constraints.NonNeg()), sparse=True)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "scales the loss"),
        (lambda: keras.optimizers.SGD(clipnorm=1.0, gradient_accumulation_steps=2), "accumulates gradients and clips"),
    ],
)
def test_what_servers_cannot_do_is_told(optimizer: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        refuse(optimizer())
    refuse(keras.optimizers.SGD(gradient_accumulation_steps=2))


def test_who_hosts_what() -> None:
    model = SimpleNamespace(trainable_variables=[variable(), variable()])
    first, *table = described(model, keras.optimizers.SGD(), client(), with_map=True)
    assert first == "servers    ranks 0, 1, sync; 1 worker"
    assert len(table) == 1
    assert described(model, keras.optimizers.SGD(), client(), with_map=False) == [first]
