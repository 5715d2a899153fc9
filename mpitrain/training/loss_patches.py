"""Where Keras is patched, so that a step under way takes part in what Keras computes of losses, metrics and moments."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mpitrain.runtime import keras_private
from mpitrain.runtime.keras_private import patch
from mpitrain.strategies.weighting import gradient_weight
from mpitrain.training.batch_moments import moments
from mpitrain.training.gradient_use import current_uses
from mpitrain.training.loss_terms import overriding
from mpitrain.training.step_collectives import StepCollectives
from mpitrain.world.world import World

Reduce = Callable[..., Any]
_current: contextvars.ContextVar[Any] = contextvars.ContextVar("step", default=None)
_kept: contextvars.ContextVar[StepCollectives | None] = contextvars.ContextVar("kept", default=None)
_share: contextvars.ContextVar[Any] = contextvars.ContextVar("share", default=None)


@contextlib.contextmanager
def stepping(step: Any) -> Iterator[None]:
    """Local: in this context `step`, a `loss_shares.Step`, is the one under way."""
    for kind in overriding(keras.losses.Loss):
        _patch_call(kind)
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def keep_batch_norm_synchronized(world: World | None) -> None:
    """Local: from now on batch normalization uses the moments of all ranks' rows, in steps of the script's own too.

    Args:
        world: the ranks; None for each rank's own moments, as at first.
    """
    install()
    _kept.set(None if world is None else StepCollectives(world))


def keep_share(share: Any) -> None:
    """Local: from now on what Keras adds up for regularizers, in steps of the script's own, is this rank's share of it.

    Args:
        share: what it is multiplied by, a variable that is read in each step; None for all of it, as at first.
    """
    install()
    _share.set(share)


def _own_share(loss: Any) -> Any:
    share = _share.get()
    return loss if share is None or isinstance(loss, keras.KerasTensor) else loss * tf.cast(share, loss.dtype)


def _update_by_function(original: Reduce, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Local: as `MeanMetricWrapper.update_state`; collective where its function gives a number of a whole batch."""
    step = _current.get()
    if step is None:
        return original(metric, *args, **kwargs)
    with keras_private.computing_by(metric, step.of_whole_batch(keras_private.function_of(metric))):
        return original(metric, *args, **kwargs)


def _moments(original: Reduce, layer: Any, inputs: Any, mask: Any) -> Any:
    """Collective where ranks take them together: as Keras' method of batch normalization."""
    step, kept, found = _current.get(), _kept.get(), None
    if step is not None and not isinstance(inputs, keras.KerasTensor):
        found = step.moments(layer, inputs, mask)
    elif step is None and kept is not None and not isinstance(inputs, keras.KerasTensor):
        found = moments(inputs, mask, keras_private.normalized_axes(layer), kept, gradient_weight())
    return original(layer, inputs, mask) if found is None else found


def _add_loss(original: Reduce, layer: Any, loss: Any) -> None:
    """Local: as the method of a layer."""
    step = _current.get()
    by_keras = sys._getframe(2).f_globals.get("__name__", "").startswith("keras.")
    if step is not None:
        step.note_added(layer, loss, by_keras)
    elif by_keras and not keras_private.ACTIVITY_LOSS_IS_A_SUM:
        loss = _own_share(loss)
    original(layer, loss)


@functools.cache
def _patch_call(kind: Any) -> None:
    """Local: as `install`, for a class of the script's own."""

    def call(original: Reduce, loss: Any, *args: Any, **kwargs: Any) -> Any:
        step = _current.get()
        if step is None:
            return original(loss, *args, **kwargs)
        return step.overridden(original, loss, *args, **kwargs)

    patch(kind, "__call__", call)


@functools.cache
def install() -> None:
    """Local: let a step that is under way take part in what Keras computes; without one nothing is changed."""

    def call(original: Reduce, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = _current.get()
        if step is None:
            return original(loss, y_true, y_pred, sample_weight)
        return step.loss(original, loss, y_true, y_pred, sample_weight)

    def reduce(
        original: Reduce,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        step, value = _current.get(), original(values, sample_weight, mask, reduction, dtype)
        return value if step is None else step.term(value, values, sample_weight, mask, reduction)

    def compute_loss(original: Reduce, model: Any, *args: Any, **kwargs: Any) -> Any:
        step = _current.get()
        if step is not None:
            step.computed_by_keras = True
        found, uses = original(model, *args, **kwargs), current_uses()
        if uses is not None:
            uses.losses.append(found)
        return found

    def own_losses(original: Reduce, layer: Any) -> Any:
        step, found = _current.get(), original(layer)
        return found if step is None else step.added_losses(found)

    def regularization(original: Reduce, layer: Any) -> Any:
        step, found = _current.get(), original(layer)
        return [_own_share(one) for one in found] if step is None else step.regularization(found)

    def update_state(original: Reduce, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        step = _current.get()
        return original(metric, values, sample_weight if step is None else step.weight(metric, values, sample_weight))

    patch(keras.losses.Loss, "__call__", call)
    patch(keras.metrics.Mean, "update_state", update_state)
    patch(keras.metrics.Sum, "update_state", update_state)
    patch(keras.metrics.MeanMetricWrapper, "update_state", _update_by_function)
    patch(keras_private.loss, keras_private.REDUCTION, reduce)
    patch(keras.Model, "compute_loss", compute_loss)
    patch(keras.layers.Layer, "add_loss", _add_loss)
    patch(keras.layers.Layer, keras_private.OWN_LOSSES, own_losses)
    patch(keras.layers.Layer, keras_private.REGULARIZATION, regularization)
    patch(keras.layers.BatchNormalization, keras_private.MOMENTS, _moments)
