"""The model as a file of Keras, written from a snapshot."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from mpitrain.checkpoint.files import Array
from mpitrain.checkpoint.resume import tell
from mpitrain.runtime import keras_private


def save_keras(model: Any, values: Sequence[tuple[Any, Array]], path: Path) -> None:
    """Local: a snapshot of a model as a `.keras` file; on any thread, while the model itself goes on changing.

    A model that Keras cannot save gets no file, and a line that says why. The values are those of its variables and of
    its optimizer's.

    Raises:
        OSError: it cannot be written.
    """
    known = [(variable, value) for variable, value in values if isinstance(variable, keras.Variable)]
    try:
        keras_private.keep_reference_objects()
        # In this scope, which is the thread's own, variables have the values given here.
        with tf.device("CPU:0"), keras.StatelessScope(known):
            inspect.unwrap(keras.Model.save)(model, path)  # not what the script runner makes of it
    except OSError:
        raise
    except Exception as error:  # whatever the model's own `get_config` raises
        path.unlink(missing_ok=True)
        tell(f"the checkpoint has no {path.name}: Keras cannot save this model ({type(error).__name__}: {error})")
