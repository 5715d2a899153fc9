"""One training run in two calls of `fit`: what is left of an epoch, and the epochs after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

FINALIZE = "finalize_variable_values"


class SplitFitCallbacks(keras.callbacks.CallbackList):
    """Callbacks that see one run, though `fit` is called twice.

    Attributes:
        steps_before: of the epoch under way, done in an earlier process.
        is_last: this `fit` is the last one.
    """

    def __init__(self, callbacks: list[Any], model: Any, epochs: int, steps: int) -> None:
        super().__init__(callbacks, add_history=True, model=model, epochs=epochs, steps=steps, verbose=0)
        self.steps_before, self.is_last, self._has_begun = 0, True, False

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._has_begun:
            self._has_begun = True
            super().on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        if self.is_last:
            super().on_train_end(logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self.steps_before, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self.steps_before, logs)

    @contextmanager
    def rest_of_epoch(self, steps_before: int) -> Iterator[None]:
        """Local: within this, `fit` finishes an epoch and not the run: weights are not yet averaged for its end."""
        optimizer = self.model.optimizer
        self.steps_before, self.is_last = steps_before, False
        patched = vars(optimizer).get(FINALIZE)  # where parameter servers have the weights
        # object.__setattr__: Keras tracks what is assigned to an optimizer; this is none of its state.
        object.__setattr__(optimizer, FINALIZE, lambda variables: None)
        try:
            yield
        finally:
            object.__delattr__(optimizer, FINALIZE)
            if patched is not None:
                object.__setattr__(optimizer, FINALIZE, patched)
            self.steps_before, self.is_last = 0, True
