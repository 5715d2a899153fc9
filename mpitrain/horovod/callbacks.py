"""Horovod's Keras callbacks, for Keras 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.collectives import operations as collectives
from mpitrain.horovod.basics import rank, size, world
from mpitrain.horovod.gradients import LocalVariables
from mpitrain.horovod.variables import broadcast_variables
from mpitrain.runtime import keras_private
from mpitrain.strategies.replicas import has_value

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """All ranks start from rank `root_rank`'s variables.

    They are broadcast before the first step, and those of a model that is built by its first step after it; such a
    model starts from rank 0's, where the distributed optimizer sees to that.

    Args:
        root_rank: whose values are taken.
        device: of no effect.
        local_variables: variables that stay each rank's own.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root, self._local = root_rank, LocalVariables()
        single = hasattr(local_variables, "assign")
        self._local.add(*((local_variables,) if single else local_variables or ()))
        self._missing = False

    def register_local_var(self, var: Any) -> None:
        """Local: this variable stays each rank's own."""
        self._local.add(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective: before the first step."""
        self._missing = not self.model.built
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective: after the first step of a model that was built by it."""
        if self._missing:
            self._missing = False
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        found, own = list(self.model.variables), list(self._local)
        if optimizer is not None and optimizer.built:
            found += optimizer.variables
            own += keras_private.slots_of(optimizer, lambda v: v in self._local)
        # By `is`, for `==` of variables compares their values.
        broadcast_variables([v for v in found if not any(v is one for one in own) and has_value(v)], self._root)


class MetricAverageCallback(keras.callbacks.Callback):
    """`logs` at the end of an epoch become their mean over ranks; to stand before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective: average."""
        if logs and size() > 1:
            names = sorted(logs)
            own = np.array([float(logs[name]) for name in names])
            # By name: ranks that have other metrics are told, instead of averaging one with another.
            means = collectives.all_reduce(own, "mean", name=", ".join(names), world=world()).numpy()
            logs.update(zip(names, means.tolist(), strict=True))


class Momentum(float):
    """The momentum of an optimizer, of which a step, compiled or not, takes a multiple.

    To Keras, which checks and saves it, it is the number that it was; TensorFlow reads the variable.
    """

    def __new__(cls, value: float) -> Momentum:
        """Local: as a float, with a variable of the same value."""
        own = super().__new__(cls, value)
        with tf.init_scope():
            own._current = tf.Variable(value, trainable=False, dtype=tf.float32)
        return own

    _current: Any

    @classmethod
    def of(cls, model: Any) -> Momentum:
        """Local: that of the model's optimizer, which is made one if it is a plain number."""
        found = model.optimizer.momentum
        if not isinstance(found, cls):
            found = model.optimizer.momentum = cls(found)
            model.make_train_function(force=True)  # what was compiled before holds the number
        return found

    def scale(self, factor: float) -> None:
        """Local: the steps that follow take `factor` times the number."""
        self._current.assign(float(self) * factor)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """Local: its present value, read when the step runs."""
        value = self._current.read_value()
        return value if dtype is None else tf.cast(value, dtype)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """The learning rate is `initial_lr` times `multiplier`, from epoch `start_epoch` until `end_epoch`.

    Args:
        initial_lr: at multiplier 1.
        multiplier: a function of the epoch, which is a fraction where `staircase` is False, or a number: the rate
            is then multiplied by it once more in each epoch.
        start_epoch: the first epoch.
        end_epoch: the first epoch without effect; None for no end.
        staircase: set the rate once an epoch.
        momentum_correction: scale the momentum with the rate in the step that changes it (Goyal et al.,
            "Accurate, Large Minibatch SGD", 2017).
        steps_per_epoch: needed without `staircase` where Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate at multiplier 1")
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.staircase = staircase
        self.start_epoch, self.end_epoch = start_epoch, math.inf if end_epoch is None else end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._momentum: Momentum | None = None
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Local: find the number of steps, and make the momentum one that a compiled step reads anew.

        Raises:
            ValueError: the number of steps is needed, and not known.
        """
        if self.momentum_correction and getattr(self.model.optimizer, "momentum", None):
            self._momentum = Momentum.of(self.model)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("give steps_per_epoch: Keras does not know the number of batches here")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Local: note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Local: set the rate of this step."""
        if self.start_epoch <= self._epoch < self.end_epoch and not (self.staircase and batch):
            fraction = batch / (self.steps_per_epoch or 1)
            self._set(self.initial_lr * self.multiplier(self._epoch + (0 if self.staircase else fraction)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Local: the momentum of before."""
        if self._momentum is not None:
            self._momentum.scale(1.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Local: tell the rate in `logs`."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, rate: float) -> None:
        optimizer, before = self.model.optimizer, self._rate()
        optimizer.learning_rate = rate
        if self._momentum is not None and before:
            self._momentum.scale(rate / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate rises from `initial_lr / size` to `initial_lr` in the first epochs (Goyal et al., 2017).

    Args:
        initial_lr: at the end of the warm-up.
        warmup_epochs: how long it takes.
        momentum_correction: see LearningRateScheduleCallback.
        steps_per_epoch: see there.
        verbose: 1 to print the rate at the end, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (reached * (size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Local: as above; say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model; the path is set later, as attribute `filepath`.

    Its arguments are those of `ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            f"best{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
