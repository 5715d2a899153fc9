"""The model as a file of Keras, written from a snapshot."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.saving.saving_lib import get_attr_skipset

from mpitrain.checkpoint.files import Array
from mpitrain.checkpoint.resume import tell


def save_keras(model: Any, values: Sequence[tuple[Any, Array]], path: Path) -> None:
    """Local: a snapshot of a model as a `.keras` file; on any thread, while the model itself goes on changing.

    A model that Keras cannot save gets no file, and a line that says why.

    Args:
        model: whose configuration is saved.
        values: of its variables and those of its optimizer.
        path: of the file.

    Raises:
        OSError: it cannot be written.
    """
    known = [(variable, value) for variable, value in values if isinstance(variable, keras.Variable)]
    try:
        _make_reference_objects()
        # In this scope, which is the thread's own, variables have the values given here.
        with tf.device("CPU:0"), keras.StatelessScope(known):
            inspect.unwrap(keras.Model.save)(model, path)  # not what the script runner makes of it
    except OSError:
        raise
    except Exception as error:  # whatever the model's own `get_config` raises
        path.unlink(missing_ok=True)
        tell(f"the checkpoint has no {path.name}: Keras cannot save this model ({type(error).__name__}: {error})")


def _make_reference_objects() -> None:
    """Local: what Keras compares objects with while it saves, for this thread.

    It makes an optimizer for that, which it may not inside a StatelessScope. It means to keep the result (and looks
    for it under these names, but keeps it under others: seen with 3.15).
    """
    for kind in ("Operation", "Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss"):
        global_state.set_global_attribute(f"saving_attr_skiplist_{kind}", get_attr_skipset(kind))
