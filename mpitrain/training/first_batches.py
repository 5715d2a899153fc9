"""Checksums of the first batches that a model is trained on, for the comparison of what the ranks read."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives.ordering import host_call
from mpitrain.faults.activity import LOOKED_AT_BATCHES, Activity


class FirstBatches:
    """Notes the batches of one model. To be made outside of graphs."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        with tf.device("CPU:0"):
            self._seen = tf.Variable(0, dtype=tf.int32, trainable=False, name="batches_seen")

    def note(self, data: Any) -> None:
        """Local: note a batch, at once or, in a graph that is being traced, at its first runs.

        After those the graph makes no call to the host any more, only a comparison.
        """
        leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
        if tf.executing_eagerly():
            if len(self._activity.batches) < LOOKED_AT_BATCHES:
                self._activity.note_batch([np.asarray(leaf) for leaf in leaves])
            return

        def note(*arrays: Any) -> np.int32:
            self._activity.note_batch([np.asarray(array) for array in arrays])
            return np.int32(0)

        def look() -> tf.Tensor:
            with tf.control_dependencies(host_call(note, leaves, [tf.int32])):
                return tf.identity(self._seen.assign_add(1))

        tf.cond(self._seen < LOOKED_AT_BATCHES, look, lambda: tf.constant(LOOKED_AT_BATCHES))
