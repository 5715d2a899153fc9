"""The variables of one model: which of them ranks have in common, and how they come to be the same."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.errors import AgreedError
from mpitrain.runtime import keras_private
from mpitrain.runtime.counted import counted
from mpitrain.strategies.replicas import adopt, average_statistics, differing, has_value, part_streams, synchronize
from mpitrain.strategies.strategy import Strategy
from mpitrain.training.optimizer import hook_of, replicated_state
from mpitrain.world.world import World


def synchronize_before_trace(model: Any, data: Any, world: World) -> None:
    """Collective: build a model that has no variables yet, and give it rank 0's, before its first step runs.

    Keras builds some models only while it traces the first step, where a variable has no value yet.
    """
    build(model, data)
    with tf.init_scope():
        synchronize_start(model, world)


def build(model: Any, data: Any) -> None:
    """Local: build a model and its metrics, where they are not, before a step is traced.

    Custom models without a usable `call` cannot be built so; their optimizers synchronize what they train at the first
    update.
    """
    with tf.init_scope(), contextlib.suppress(Exception):
        keras_private.build_for(model, data)


def synchronize_start(model: Any, world: World) -> None:
    """Collective: rank 0's variables on all ranks, but random streams of their own."""
    state = [v for v in _state(model) if has_value(v)]
    synchronize(state, world=world)
    part_streams(state, world=world)


def _state(model: Any) -> list[Any]:
    """Local: all that must be the same before the first step."""
    found = [*model.variables]
    if model.optimizer is not None:
        hook = hook_of(model.optimizer)
        started = hook is not None and hook.synchronized
        found += replicated_state(model.optimizer) if started else model.optimizer.variables
    # Metrics count what this rank alone has seen.
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    return list({id(v): v for v in found if id(v) not in metrics}.values())


def verify_vocabularies(model: Any, world: World) -> None:
    """Collective: layers that look texts up number them alike: these are no variables, which would become rank 0's.

    Args:
        model: the same on all ranks.
        world: the job.

    Raises:
        AgreedError: on all ranks: some number them otherwise.
    """
    layers = [one for one in keras_private.layers_within(model) if hasattr(one, "get_vocabulary")]
    if not layers:
        return
    texts = ["\0".join(map(str, layer.get_vocabulary())) for layer in layers]
    own = np.array([zlib.crc32(text.encode("utf-8", "replace")) for text in texts], np.int64)
    world.agreement.call(f"vocabularies of {counted(len(layers), 'layer')}")
    everyone = np.zeros((world.size, len(layers)), np.int64)
    world.communicator.all_gather(own, everyone)
    for layer, unlike in zip(layers, (everyone != everyone[0]).T, strict=True):
        if unlike.any():
            ranks = world.agreement.name(np.flatnonzero(unlike).tolist())
            raise AgreedError(
                f"fit: the vocabulary of {layer.name} is not the same on {ranks} as on rank 0. Make it of the "
                "same texts on all ranks, in the same order: sort what comes from a set"
            )


def step_counters(optimizer: Any) -> list[Any]:
    """Local: what counts the steps of an optimizer, and of the one inside it."""
    return [keras_private.step_counter(one) for one in (optimizer, getattr(optimizer, "inner_optimizer", None)) if one]


def statistics(model: Any) -> list[Any]:
    """Local: non-trainable floating-point weights: moments of batch normalization and the like."""
    return [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]


def unlike_counts(model: Any, world: World) -> list[str]:
    """Collective: names of what layers of the script keep in weights that are not trained, and ranks have otherwise."""
    layers = [one for one in keras_private.layers_within(model) if not isinstance(one, keras.Model)]
    known = {id(v) for one in layers if type(one).__module__.startswith("keras.") for v in one.weights}
    own = [v for v in model.non_trainable_weights if id(v) not in known and has_value(v)]
    return [own[position].path for position, _ in differing(own, world=world)] if own else []


def settle_statistics(model: Any, layers: Sequence[Any], strategy: Strategy) -> None:
    """Collective: statistics become the same on all ranks, before they are used.

    Args:
        model: of which.
        layers: whose statistics all ranks with data take together: those of one that took part in the latest step
            are right, for ranks without data have missed it. Of the others the mean is taken.
        strategy: knows the latest step.
    """
    agreed = strategy.agreed
    latest = 0 if agreed is None else int(np.argmax(agreed.samples > 0))
    common = {id(v): v for layer in layers for v in layer.non_trainable_variables}
    own = [v for v in statistics(model) if id(v) not in common]
    if common:
        adopt([*common.values()], latest, world=strategy.world)
    average_statistics(own, world=strategy.world)


def replicated(model: Any) -> list[Any]:
    """Local: what the optimizer keeps identical: weights that are trained, and its own state."""
    hook = hook_of(model.optimizer)
    own = [] if hook is not None and not hook.exchange.replicates_state else replicated_state(model.optimizer)
    return [*model.trainable_variables, *own]


def average_batch_statistics(model: Any, world: World) -> None:
    """Collective: moments of batch normalization become the mean over ranks."""
    average_statistics(statistics(model), world=world)
