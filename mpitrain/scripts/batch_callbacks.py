"""Callbacks that look at single batches: they see the same numbers, and decide alike, on all ranks.

Ranks may have different numbers of batches. One that has run out takes part in the batches of the others: it adds
what it has to the numbers, and its callbacks are called as theirs are. So a callback that sets a learning rate or
stops the training after so many batches does it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from mpitrain.runtime import keras_private
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.logs import Leaves, LogsCall, Path, leaves_of, nested
from mpitrain.training.model_hook import hook_in
from mpitrain.world.agreement import Agreed
from mpitrain.world.calls import Call
from mpitrain.world.world import World

BEGINS, ENDS, ENDED = "the begin of", "the end of", "what follows after"
STOP = {"train": "stop_training", "test": "stop_evaluating"}
# Keras' own callbacks that look at batches only if this attribute says so.
WHEN = {"TensorBoard": "update_freq", "ModelCheckpoint": "save_freq", "BackupAndRestore": "save_freq"}


def looks_at(callback: Any, kind: str, moments: Sequence[str] = ("begin", "end")) -> bool:
    """Local: whether a callback does something at batches."""
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    for name in (f"on_{one}_{moment}" for one in (f"{kind}_batch", "batch") for moment in moments):
        if not keras_private.is_default(getattr(callback, name)) and not _only_at_epochs(callback, name):
            return True
    return False


def _only_at_epochs(callback: Any, method: str) -> bool:
    for name, attribute in WHEN.items():
        keras_own = getattr(keras.callbacks, name)
        if isinstance(callback, keras_own) and getattr(type(callback), method) is getattr(keras_own, method):
            return bool(getattr(callback, attribute, None) == "epoch")
    return False


def synchronize_callbacks(world: World, callbacks: Sequence[Any]) -> list[Any]:
    """Local: the callbacks, between two that let them see and do the same on all ranks, if they look at batches.

    They stand behind `DataParallel`.
    """
    kinds = [kind for kind in STOP if any(looks_at(one, kind) for one in callbacks)]
    if not kinds or world.size == 1:
        return [*callbacks]
    batches = _Batches(world, callbacks, kinds)
    # Keras calls them in this order: the first makes the numbers those of all ranks before the script's look at them,
    # the last finds out whether one of these has stopped the training.
    return [BeforeCallbacks(batches), *callbacks, BehindCallbacks(batches)]


@dataclass(frozen=True)
class _BatchCall(Call):
    """What happens to a batch."""

    kind: str  # of batch
    moment: str  # of it
    logs: LogsCall | None = None  # of which the ranks make one, at its end

    def __str__(self) -> str:
        """Local: the moment."""
        return f"{self.moment} a {self.kind} batch" + (f": {self.logs}" if self.logs else "")


class _Batches:
    """What the two callbacks share."""

    def __init__(self, world: World, callbacks: Sequence[Any], kinds: Sequence[str]) -> None:
        self.model: Any = None
        self._world, self._callbacks, self._kinds = world, callbacks, kinds
        self._begins = [kind for kind in kinds if any(looks_at(one, kind, ("begin",)) for one in callbacks)]
        self._joining = strategy_of(world).joining
        self._own: dict[str, Leaves] = {}  # latest numbers of this rank in this epoch

    def enter(self, kind: str) -> None:
        """Local: batches of that kind begin."""
        self._joining.takes_part.append(lambda call: self._without_data(kind, call))

    def leave(self) -> None:
        """Local: the batches entered last have ended."""
        self._joining.takes_part.pop()

    def forget(self, kind: str) -> None:
        """Local: the numbers of this rank begin anew."""
        self._own.pop(kind, None)

    def begin(self, kind: str, batch: int) -> None:
        """Collective: a batch begins on the ranks that have one."""
        if kind in self._begins and self._in_step(kind):
            agreed = self._world.agreement.call(_BatchCall(kind, BEGINS), idle_ok=True)
            self._number(agreed, batch)

    def end(self, kind: str, batch: int, logs: dict[str, Any]) -> None:
        """Collective: numbers in `logs` become those of all ranks."""
        if self._in_step(kind):
            own = self._own[kind] = leaves_of(logs)
            reducing = hook_in(self.model).logs
            agreed = self._world.agreement.call(_BatchCall(kind, ENDS, reducing.call(own)), idle_ok=True)
            self._number(agreed, batch)
            logs.update(reducing.reduce(list(own), own, hook_in(self.model).latest.samples))

    def settle(self, kind: str) -> None:
        """Collective: where one rank stops, all stop."""
        if self._in_step(kind):
            self._world.agreement.call(_BatchCall(kind, ENDED), idle_ok=True)
            self._agree_on_stop(kind)

    def _in_step(self, kind: str) -> bool:
        # A call that holds several updates may hold fewer on a rank that runs out of data.
        return kind in self._kinds and (kind == "test" or self.model.steps_per_execution == 1)

    def _number(self, agreed: Agreed, batch: int) -> int:
        """Collective if some rank has run out of data: it learns the number of the batch."""
        if not agreed.active.all():
            number = np.array([batch], np.int64)
            self._world.communicator.broadcast(number, int(np.argmax(agreed.active)))
            return int(number[0])
        return batch

    def _agree_on_stop(self, kind: str) -> None:
        stop = np.array([bool(getattr(self.model, STOP[kind], False))], np.int64)
        self._world.communicator.all_reduce(stop, "max")
        setattr(self.model, STOP[kind], bool(stop[0]))

    def _without_data(self, kind: str, call: Call) -> Callable[[Agreed], None] | None:
        """Local: how this rank takes part in that call of the others, if it is of their batches."""
        if not isinstance(call, _BatchCall) or call.kind != kind or not self._in_step(kind):
            return None
        if call.moment == BEGINS:
            return lambda agreed: self._call(f"on_{kind}_batch_begin", self._number(agreed, 0), {})
        if call.moment == ENDED:
            return lambda agreed: self._agree_on_stop(kind)
        # Of metrics that the others have and this rank has not, it has no states to add: it says so, and all raise.
        if call.logs is None or call.logs != hook_in(self.model).logs.call(call.logs.paths):
            return None
        paths = call.logs.paths
        return lambda agreed: self._end_without_data(kind, agreed, paths)

    def _end_without_data(self, kind: str, agreed: Agreed, paths: Sequence[Path]) -> None:
        """Collective: the end of a batch of the others, in which this rank had no samples."""
        batch, own = self._number(agreed, 0), self._own.get(kind, {})
        reduced = hook_in(self.model).logs.reduce(paths, own, 0.0)
        self._call(f"on_{kind}_batch_end", batch, {**nested(own), **reduced})

    def _call(self, method: str, batch: int, logs: dict[str, Any]) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(batch, logs=logs)


class BeforeCallbacks(keras.callbacks.Callback):
    """Stands before the callbacks that look at batches."""

    def __init__(self, batches: _Batches) -> None:
        super().__init__()
        self._batches = batches

    def set_model(self, model: Any) -> None:
        """Local: Keras tells the model."""
        super().set_model(model)
        self._batches.model = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Local: this rank can take part in batches of the others."""
        self._batches.enter("train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Local: this rank has no numbers yet."""
        self._batches.forget("train")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Collective."""
        self._batches.begin("train", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective: `logs` become those of all ranks."""
        self._batches.end("train", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Local: this rank can take part in batches of the others."""
        self._batches.enter("test")
        self._batches.forget("test")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Collective."""
        self._batches.begin("test", batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective: `logs` become those of all ranks."""
        self._batches.end("test", batch, logs)


class BehindCallbacks(keras.callbacks.Callback):
    """Stands behind the callbacks that look at batches."""

    def __init__(self, batches: _Batches) -> None:
        super().__init__()
        self._batches = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective: where one rank stops, all stop."""
        self._batches.settle("train")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective: where one rank stops, all stop."""
        self._batches.settle("test")

    def on_train_end(self, logs: Any = None) -> None:
        """Local: no more batches."""
        self._batches.leave()

    def on_test_end(self, logs: Any = None) -> None:
        """Local: no more batches."""
        self._batches.leave()
