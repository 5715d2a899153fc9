"""Loading a saved model with a distributed optimizer, as Horovod's Keras modules do."""

from __future__ import annotations

from typing import Any

import keras

from mpitrain.horovod.compression import Compression
from mpitrain.horovod.optimizers import KerasDistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Local: a saved model whose optimizer averages its gradients over all ranks.

    It is in a plain Keras file; what Horovod saved from Keras 2 does not load in Keras 3.
    """
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.compiled:
        KerasDistributedOptimizer(model.optimizer, compression=compression)
    return model
