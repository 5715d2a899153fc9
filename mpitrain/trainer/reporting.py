"""Hands the numbers of all ranks to the progress display, with the headers that travel anyway."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mpitrain.observe.progress import ProgressDisplay
from mpitrain.strategies.strategy import Strategy


class Report(keras.callbacks.Callback):
    """On every rank, behind `DataParallel` in the list of callbacks.

    Args:
        display: on rank 0, if anything is to be shown.
        own_samples: training samples of this rank.
        all_samples: training samples of all ranks.
    """

    def __init__(
        self, strategy: Strategy, display: ProgressDisplay | None, batch_size: int, own_samples: int, all_samples: int
    ) -> None:
        super().__init__()
        self._strategy, self._display = strategy, display
        self._batch_size, self._own, self._all = batch_size, own_samples, all_samples
        self._before = 0.0
        self._wanted = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective: learn whether rank 0 shows numbers of each step."""
        self._wanted = self._strategy.world.communicator.broadcast_obj(bool(self._display and self._display.is_bar))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Local: forget the last epoch's numbers."""
        self._strategy.world.agreement.report = (0.0, 0.0, 0.0)
        self._before = self._strategy.statistics.samples_global
        if self._display is not None:
            self._display.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Local: what this rank has reached goes with its next header; rank 0 shows what came with the last."""
        if not self._wanted or not logs:
            return
        own_samples = min((batch + 1) * self._batch_size, self._own)
        names = _shown(logs)
        own = {name: float(logs[name]) for name in names}
        self._strategy.world.agreement.report = (*[*own.values(), 0.0, 0.0][:2], float(own_samples))
        if self._display is not None:
            samples = self._strategy.statistics.samples_global - self._before
            self._display.update(samples or own_samples, self._everyone(names) or own)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Local: the epoch's numbers, which `DataParallel` has made those of all ranks."""
        if self._display is not None:
            numbers = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
            numbers.pop("learning_rate", None)
            self._display.end_epoch(self._all, {name: numbers[name] for name in sorted(numbers, key=_place)})

    def on_shrink(self, own_samples: int, display: ProgressDisplay | None) -> None:
        """Local: after the loss of ranks.

        Args:
            own_samples: training samples that this rank has now.
            display: if this rank is to show something from now on.
        """
        self._own = own_samples
        self._display = self._display or display

    def close(self) -> None:
        """Local: leave the terminal as it was."""
        if self._display is not None:
            self._display.close()

    def _everyone(self, names: list[str]) -> dict[str, float]:
        """Loss and metric over the samples of all ranks, as of their last step but one."""
        agreed = self._strategy.agreed
        if agreed is None:
            return {}
        weights = agreed.reports[:, 2]
        if not weights.sum():
            return {}
        means = np.average(agreed.reports[:, :2], axis=0, weights=weights)
        return dict(zip(names, means.tolist(), strict=False))


def _shown(logs: dict[str, Any]) -> list[str]:
    """Loss and the first metric."""
    metrics = [name for name in logs if name != "loss" and not name.startswith("val_")][:1]
    return [name for name in ("loss", *metrics) if name in logs]


def _place(name: str) -> tuple[bool, bool]:
    """The loss before the metrics, and both before those of the validation samples."""
    return name.startswith("val_"), name.removeprefix("val_") != "loss"
