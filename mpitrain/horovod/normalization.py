"""Batch normalization with the moments of all ranks' samples."""

from __future__ import annotations

from typing import Any

from mpitrain.errors import UsageError
from mpitrain.horovod.basics import size
from mpitrain.horovod.process_sets import table
from mpitrain.runtime import keras_private
from mpitrain.training.batch_moments import moments
from mpitrain.training.step_collectives import StepCollectives


class SyncBatchNormalization(keras_private.BatchNormalizationByMoments):
    """Normalizes with the mean and variance of the global batch: sums, squares and counts of all ranks.

    Ranks may have batches of different sizes, but each needs a batch at every step.

    Args:
        fused: only False, as in Horovod.
        kwargs: as for `keras.layers.BatchNormalization`.

    Raises:
        UsageError: `fused=True`.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise UsageError("SyncBatchNormalization does not support fused=True")
        super().__init__(**kwargs)

    def moments(self, inputs: Any, mask: Any) -> Any:
        """Collective: mean and variance over the batches of all ranks, whose gradients weigh the same."""
        if size() == 1:
            return super().moments(inputs, mask)
        return moments(inputs, mask, keras_private.normalized_axes(self), StepCollectives(table.world()), 1.0)
