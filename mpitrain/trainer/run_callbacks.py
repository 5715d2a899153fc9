"""Callbacks of one run of several calls of `fit`, which know how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.checkpoint.options import Position
from mpitrain.checkpoint.state import Array, metrics_of
from mpitrain.faults.activity import Activity
from mpitrain.trainer.split_fit import SplitFitCallbacks
from mpitrain.training.logs import leaves_of, nested


class RunCallbacks(SplitFitCallbacks):
    """Callbacks of one run that know how far it has come.

    Args:
        activity: counts the updates, also those that this rank makes without data.
        begin: where the run begins.

    Attributes:
        begun: where the epoch under way was begun.
        ended: epochs that are over, with all that callbacks do then.
        after_step: called once, after the next step.
    """

    def __init__(
        self, callbacks: list[Any], model: Any, epochs: int, steps: int, activity: Activity, begin: Position
    ) -> None:
        super().__init__(callbacks, model, epochs, steps)
        self.begun, self.ended = begin, begin.epoch
        self.after_step: Callable[[], None] | None = None
        self.keeps_metrics = False
        self._activity, self._before = activity, activity.updates
        self._variables: list[Any] = []
        self._metrics: list[Array] = []
        self._logs: dict[str, float] = {}

    def position(self, per_step: int, samples: int) -> Position:
        """Local: how far the run has come here."""
        begun, updates = self.begun, self._activity.updates - self._before
        done = min(begun.samples + updates * per_step, samples)
        return Position(begun.epoch, begun.step + updates, done, begun.steps + updates)

    def on_shrink(self, position: Position, samples: int, history: dict[str, list[float]], epochs: list[int]) -> None:
        """Local: the run goes on from there.

        Args:
            position: of the rank that is furthest.
            samples: of an epoch.
            history: what Keras has noted there.
            epochs: of which.
        """
        if position.epoch != self.begun.epoch:
            self._metrics = []
        self.begun, self.ended, self._before = position, position.epoch, self._activity.updates
        self._logs = dict.fromkeys(("loss",), 0.0) if position.samples == samples else {}
        self._history.history, self._history.epoch = history, epochs
        self.model.history = self._history

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Local: of an epoch that goes on, the metrics, too. Collective where nothing is left of it but its end."""
        self._before = self._activity.updates
        for variable, value in zip(self._variables, self._metrics, strict=False):
            variable.assign(value)
        super().on_epoch_begin(epoch, logs)
        if self._logs:
            self._logs = nested(leaves_of(self.model.get_metrics_result()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.keeps_metrics:
            self._variables = self._variables or metrics_of(self.model)  # all of them, after a step
            # Of the end of the step: in the next one this rank may have counted a batch that is lost with another rank.
            self._metrics = [np.array(variable.numpy()) for variable in self._variables]
        super().on_train_batch_end(batch, logs)
        if self.after_step is not None:
            self.after_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update({name: value for name, value in self._logs.items() if name not in logs})
        super().on_epoch_end(epoch, logs)
        self.begun = Position(epoch + 1, 0, 0, self.begun.steps + self._activity.updates - self._before)
        self._before, self.ended = self._activity.updates, epoch + 1
        self._metrics, self._logs = [], {}

    @property
    def noted(self) -> tuple[dict[str, list[float]], list[int]]:
        """What Keras has noted: numbers, and of which epochs."""
        return dict(self._history.history), list(getattr(self._history, "epoch", []))
