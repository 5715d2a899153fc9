"""What parameter servers are told of an optimizer, and what is refused because they cannot do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.reduction.buckets import TensorSpec, alone_bytes_for
from mpitrain.reduction.graph import spec_of
from mpitrain.runtime import keras_private
from mpitrain.runtime.counted import counted
from mpitrain.strategies.parameter_server.client import Client
from mpitrain.strategies.parameter_server.layout import setup_of
from mpitrain.strategies.parameter_server.shards import shard_map, table
from mpitrain.strategies.replicas import name_of

# These treat each element by itself, so the rows of a variable may stand on several servers.
BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")


def described(model: Any, optimizer: Any, client: Client, with_map: bool) -> list[str]:
    """Local: lines about the servers of these workers, and what each of them will host."""
    options, ranks = client.options, client.roles.servers
    word = "rank" if len(ranks) == 1 else "ranks"
    workers = counted(len(client.roles.workers), "worker")
    lines = [f"servers    {word} {', '.join(map(str, ranks))}, {options.mode}; {workers}"]
    variables = model.trainable_variables
    if with_map and variables:
        specs = [TensorSpec(name_of(v), tuple(v.shape), tf.as_dtype(v.dtype).name) for v in variables]
        whole = _whole(optimizer, variables)
        shards = shard_map(specs, len(ranks), options.sharding, options.max_shard_bytes, whole)
        lines.append(table(specs, shards, ranks))
    return lines


def _whole(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Local: positions of variables whose rows have to stay together."""
    by_element = type(optimizer).__name__ in BY_ELEMENT and type(optimizer).__module__.startswith("keras.")
    return [p for p, v in enumerate(variables) if not by_element or getattr(v, "constraint", None) is not None]


def refuse(optimizer: Any) -> None:
    """Local.

    Raises:
        UsageError: servers cannot do what this optimizer does.
    """
    kind = type(optimizer).__name__
    if hasattr(optimizer, "inner_optimizer"):
        raise UsageError(
            f"{kind} scales the loss, and skips updates that overflow: parameter servers cannot. Give mixed_bfloat16 "
            "instead of mixed_float16, or leave out --strategy ps"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None) and (optimizer.clipnorm or optimizer.global_clipnorm):
        raise UsageError(
            f"{kind} accumulates gradients and clips them by norm: parameter servers clip each gradient. Take a larger "
            "batch instead of gradient_accumulation_steps, or leave out --strategy ps"
        )


def setup_for(
    optimizer: Any, title: str, gradients: Sequence[Any], variables: Sequence[Any], client: Client
) -> dict[str, Any]:
    """Local: what the servers have to know of an update.

    Raises:
        UsageError: they could not host it.
    """
    specs = [spec_of(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
    constraints = [_constraint(variable, spec) for variable, spec in zip(variables, specs, strict=True)]
    _check_dtypes(specs, variables)
    sync = client.options.mode == "sync"
    with tf.init_scope():  # the learning rate is read
        config = keras.optimizers.serialize(optimizer)
    config = {**config, "config": {**config["config"], "name": "hosted"}}
    if isinstance(keras_private.learning_rate(optimizer), keras.Variable):  # it travels with each gradient
        config["config"]["learning_rate"] = 0.0
    setup = {
        **setup_of(title, specs, alone_bytes_for(client.hosts), _whole(optimizer, variables)),
        "optimizer": config,
        "floatx": keras.config.floatx(),
        "decayed": [keras_private.decays(optimizer, variable) for variable in variables],
        "constraints": constraints,
        "clipnorm": optimizer.clipnorm if sync else None,
        "global_clipnorm": optimizer.global_clipnorm if sync else None,
    }
    try:
        text = json.dumps(setup, sort_keys=True)
    except TypeError as error:
        raise UsageError(
            f"the configuration of {type(optimizer).__name__} cannot be sent to parameter servers ({error}): give it "
            "numbers, texts and Keras' own objects"
        ) from error
    return {**setup, "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def _constraint(variable: Any, spec: TensorSpec) -> Any:
    constraint = getattr(variable, "constraint", None)
    if constraint is None:
        return None
    if spec.sparse:
        raise UsageError(
            f"{spec.name} has a constraint, and its gradients are rows: parameter servers apply rows alone. Leave the "
            "constraint out, or --strategy ps"
        )
    return keras.constraints.serialize(constraint)


def _check_dtypes(specs: Sequence[TensorSpec], variables: Sequence[Any]) -> None:
    for spec, variable in zip(specs, variables, strict=True):
        if spec.dtype not in ("float32", "float64") or tf.as_dtype(variable.dtype).name != spec.dtype:
            raise UsageError(
                f"{name_of(variable)} is {tf.as_dtype(variable.dtype).name} with gradients of {spec.dtype}: parameter "
                "servers host float32 and float64. Give a mixed precision, whose variables are float32"
            )
