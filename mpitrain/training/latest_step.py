"""What is known of the latest step of a model: how many samples stand behind the numbers it returned."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from mpitrain.data.portions import count_rows
from mpitrain.strategies.strategy import Strategy


class LatestStep:
    """Of one model. To be made outside of graphs.

    Args:
        strategy: tells the samples of a training step.

    Attributes:
        has_rows: its logs may have arrays with a row for each sample.
        accumulates: of a training step no exchange tells, since gradients of several are exchanged at once.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.has_rows = self.accumulates = False
        self._strategy, self._tests = strategy, 0
        with tf.device("CPU:0"):
            # Variables: Python runs when a step is traced, these are set whenever it runs.
            self._tested = tf.Variable([0, 0], trainable=False, name="test_batches_and_rows_of_the_latest")
            self._trained = tf.Variable(0, trainable=False, name="rows_of_the_latest_training_step")

    def note_training(self, samples: Any, accumulates: bool) -> None:
        """Local: a training step of so many samples begins, or a graph of it is traced."""
        self.accumulates = accumulates
        if accumulates:
            self._trained.assign(samples)

    def note_test(self, samples: Any) -> None:
        """Local: a test step of so many samples begins, or a graph of it is traced."""
        self._tested.assign([self._tested[0] + 1, samples])

    def note_logs(self, logs: Any, data: Any) -> None:
        """Local: what a step returned for `data`, or returns in the graph that is being traced."""
        counted = count_rows(data)
        rows = counted if isinstance(counted, int) else None
        shapes = [tf.TensorShape(leaf.shape) for leaf in keras.tree.flatten(logs) if hasattr(leaf, "shape")]
        # A length that is not known in a graph may be that of the batch.
        self.has_rows = any(shape.rank is None or (shape.rank and shape[0] in (None, rows)) for shape in shapes)

    def begin_test(self) -> None:
        """Local: an evaluation begins."""
        self._tests += 1
        self._tested.assign([0, 0])

    def end_test(self) -> None:
        """Local: an evaluation has ended."""
        self._tests -= 1

    @property
    def batches(self) -> int:
        """Of this rank in the evaluation under way; 0 outside, where all ranks make each step together."""
        return int(self._tested[0].numpy()) if self._tests else 0

    @property
    def samples(self) -> float:
        """Of this rank, behind the numbers of the latest step."""
        if self._tests:
            return float(self._tested[1].numpy())
        if self.accumulates:
            return float(self._trained.numpy())
        agreed = self._strategy.agreed
        return 1.0 if agreed is None else float(agreed.samples[self._strategy.world.rank])
