"""What other callbacks count, and the learning rate of a run that goes on under other conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

# Of these callbacks of Keras, what decides and is no argument.
COUNTERS = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}


def counters_of(callback: Any) -> dict[str, Any]:
    """Local: what a callback has counted, as JSON can hold it."""
    name = type(callback).__name__
    found = {key: vars(callback).get(key) for key in COUNTERS.get(name, ())}
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in found.items()}
    return {"callback": name, **{key: value for key, value in plain.items() if isinstance(value, int | float)}}


def set_counters(callback: Any, counters: Mapping[str, Any]) -> None:
    """Local: a callback goes on counting where another of its kind was; call it after `on_train_begin` of that one."""
    name = type(callback).__name__
    if counters.get("callback") == name:
        vars(callback).update({key: counters[key] for key in COUNTERS.get(name, ()) if key in counters})


def learning_rate_of(optimizer: Any) -> float | None:
    """Local: None where it follows a schedule."""
    rate = getattr(optimizer, "learning_rate", None)
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def scale_learning_rate(optimizer: Any, here: float | None, there: float | None) -> None:
    """Local: where this run began with another rate than the one before (other ranks, another option), keep the ratio.

    `here` is the rate with which this run began, `there` that of the one before; None where it is not known.
    """
    if here is not None and there is not None and here != there:
        optimizer.learning_rate.assign(float(optimizer.learning_rate.numpy()) * here / there)
