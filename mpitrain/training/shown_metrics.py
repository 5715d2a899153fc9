"""Results that a script asks metrics for by itself: those of all ranks, once they have been computed.

The state of a metric stays each rank's own, so that it goes on from there. What its state over all ranks was is kept
beside it, and its result is made of that as long as its own state has not changed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.collectives.conversion import of_the_script
from mpitrain.runtime.keras_private import patch

ATTRIBUTE = "_mpitrain_over_ranks"
_own: contextvars.ContextVar[bool] = contextvars.ContextVar("own", default=False)


@contextlib.contextmanager
def of_this_rank() -> Iterator[None]:
    """Local: in this context results are those of this rank's own state."""
    token = _own.set(True)
    try:
        yield
    finally:
        _own.reset(token)


def show(metrics: Sequence[Any], variables: Sequence[Any], own: Sequence[Any], combined: Sequence[Any]) -> None:
    """Local: what the states of metrics are over all ranks.

    Args:
        metrics: all of them.
        variables: of all metrics.
        own: their values on this rank.
        combined: over all ranks.
    """
    places = {id(variable): place for place, variable in enumerate(variables)}
    for metric in within(metrics):
        found = [places[id(variable)] for variable in metric.variables if id(variable) in places]
        states = [own[place] for place in found], [combined[place] for place in found]
        # object.__setattr__: Keras tracks what is assigned to a metric; this is none of its state.
        object.__setattr__(metric, ATTRIBUTE, states)


@functools.cache
def let_show(kind: Any) -> None:
    """Local: patch a class of metrics, once."""
    _patch(definer(kind, "result"), "result", _result)
    _patch(definer(kind, "reset_state"), "reset_state", _reset_state)


@functools.cache
def _patch(owner: Any, name: str, function: Callable[..., Any]) -> None:
    patch(owner, name, function)


def _result(result: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Local: as the metric's own."""
    states = vars(metric).get(ATTRIBUTE)
    if states is None or _own.get() or not tf.executing_eagerly():
        return of_the_script(result)(metric, *args, **kwargs)
    variables, (own, combined) = metric.variables, states
    now = [np.array(variable.numpy()) for variable in variables]
    if len(now) != len(own) or not all(map(_same, now, own)):
        return result(metric, *args, **kwargs)
    with of_this_rank():
        _assign(variables, combined)
        try:
            return result(metric, *args, **kwargs)
        finally:
            _assign(variables, own)


def _reset_state(reset: Callable[..., Any], metric: Any) -> Any:
    """Local: as the metric's own."""
    for one in within([metric]):
        vars(one).pop(ATTRIBUTE, None)
    return of_the_script(reset)(metric)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def within(metrics: Sequence[Any], known: set[int] | None = None) -> Iterator[Any]:
    """Local: metrics, and those that they hold."""
    known = set() if known is None else known
    for metric in metrics:
        if isinstance(metric, keras.Metric) and id(metric) not in known:
            known.add(id(metric))
            yield metric
            held = [value for value in vars(metric).values() if isinstance(value, list | tuple | dict | keras.Metric)]
            yield from within(keras.tree.flatten(held), known)


def definer(kind: Any, name: str) -> Any:
    """Local: the class whose method it is."""
    return next(owner for owner in kind.__mro__ if name in vars(owner))
