"""The Keras callback that writes checkpoints, goes on from one, and ends the job when a signal asks for it.

When something is to be done is decided where all ranks stand at the same place: a rank writes what it wants into the
header that precedes each exchange of gradients (`Agreement.request`), so all know it at the end of that step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mpitrain.checkpoint import state
from mpitrain.checkpoint.counters import counters_of, learning_rate_of, scale_learning_rate, set_counters
from mpitrain.checkpoint.files import Array, Snapshot
from mpitrain.checkpoint.model_file import save_keras
from mpitrain.checkpoint.options import CheckpointOptions, Dealt, Position
from mpitrain.checkpoint.requests import SAVE, Requests
from mpitrain.checkpoint.resume import Resumption, differences, position_among, resumption, tell
from mpitrain.checkpoint.stop import StopRequest, where_from
from mpitrain.checkpoint.store import Quality, Store
from mpitrain.checkpoint.writer import BackgroundWriter
from mpitrain.config import own_options
from mpitrain.errors import AgreedError, UsageError
from mpitrain.runtime import keras_private, marks
from mpitrain.runtime.counted import counted
from mpitrain.training.model_hook import mark_synchronized
from mpitrain.training.model_state import build
from mpitrain.training.optimizer import hook_of
from mpitrain.world.consensus import run_on_all
from mpitrain.world.start import current_world
from mpitrain.world.world import World


class Checkpoint(keras.callbacks.Callback):
    """Saves the state of a training run, and goes on from it. Stands last in the list of callbacks.

    Collective: all ranks make it, and give it to `fit`, behind `DataParallel`. It looks for a checkpoint when it is
    made; `position` then tells where training goes on. `fit` begins with that epoch, and in the middle of it reads the
    batches that were done before without training on them: give it data whose order follows from the epoch's number.
    A model without weights has to be built before (by calling it on a batch).

    SIGTERM, SIGUSR1 or Ctrl-C on any rank lets all ranks finish the step, write a checkpoint and leave with exit
    code 85 (130 for Ctrl-C).

    Args:
        directory: where this run keeps its checkpoints. Rank 0 writes.
        every: `epoch`, or as in `500steps`, `30s`, `10min`, `2h`.
        keep: how many of the newest are kept.
        best: metric whose best checkpoint is kept too; `val_loss`, or without validation `loss`, by default.
        resume: `auto`, from the newest whole one, if there is one; `never`; or the path of one.
        grace_seconds: from a signal to the end of the job.
        callbacks: others whose counters are saved too: EarlyStopping, ReduceLROnPlateau, ModelCheckpoint.
        world: the job; the current one by default.
        dealt: how samples are dealt out, by whoever begins in the middle of an epoch himself.
        run: see `CheckpointOptions`.

    Attributes:
        position: where this run begins.
        finished: the earlier run was stopped by a callback before its last epoch, and nothing is left to do.
        differences: in what this run is another one than the one it goes on from, in words.

    Raises:
        AgreedError: on all ranks: no checkpoint can be written, or the one to go on from is damaged.
        StoppedBySignal: a SystemExit, out of `fit` on all ranks.

    Example:
        >>> checkpoint = mpitrain.callbacks.Checkpoint(directory, every="10min", keep=2)
        >>> checkpoint.position.epoch  # where `fit` will begin
        0
    """

    def __init__(
        self,
        directory: Path | str,
        every: str = "epoch",
        *,
        keep: int = 3,
        best: str | None = None,
        resume: str = "auto",
        grace_seconds: float = 30.0,
        callbacks: Sequence[Any] = (),
        world: World | None = None,
        dealt: Dealt | None = None,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        arguments = locals()
        super().__init__()
        chosen = {name: arguments[name] for name in own_options(CheckpointOptions)}
        self._world = world or current_world()
        self._options = CheckpointOptions(Path(directory), run=run or {}, **chosen)
        self._store = Store(self._options.directory, keep)
        self._callbacks, self._dealt, self._writer = list(callbacks), dealt, BackgroundWriter(tell)
        self._requests = Requests(self._world, lambda: self._writer.busy, lambda: self._leaving.number)
        self._leaving = StopRequest(self._world, grace_seconds, self._requests.tell)
        self._resumed = resumption(self._options, self._store, self._world.communicator)
        self.position, self.finished = Position(), False
        if self._resumed is not None:
            self.finished = bool(self._resumed.info["stopped"])
            resumed = self._resumed
            place = (self._world.communicator, self._world.hosts)
            self.position = run_on_all(*place, lambda: position_among(resumed, dealt, self._world.size, self._say))
        self.differences = [] if self._resumed is None else differences(self._options.run, self._resumed.info)
        self._now = self.position
        self._history: dict[str, list[float]] = {}
        self._best: Quality | None = None
        self._last_seconds = 0.0
        self._learning_rate: float | None = None
        self._saved: Position | None = None
        self._arrays: dict[str, Array] = {}
        self._is_resumed_epoch = self._resumed is not None

    def go_on(self, position: Position, dealt: Dealt | None, history: dict[str, list[float]], new_root: bool) -> None:
        """Local: after the loss of ranks, the run goes on from there.

        Args:
            position: of all ranks that are left.
            dealt: how samples are dealt out to them.
            history: of the run.
            new_root: this rank writes from now on.
        """
        self._now, self._dealt, self._saved, self._resumed = position, dealt, None, None
        self._is_resumed_epoch = True
        self._history = {name: list(values) for name, values in history.items()}
        if new_root:
            with contextlib.suppress(UsageError):  # it is told when the next one cannot be written
                self._store.prepare()
        self._plan()

    # What Keras calls.

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective: restore, and begin to listen to signals."""
        self._refuse_unfit()
        steps = self._world.communicator.all_gather_obj(self.params.get("steps"))
        # With several steps a call Keras calls back once for all: at different ones where ranks have different numbers.
        equal_steps = steps[0] is not None and steps.count(steps[0]) == len(steps)
        self._requests.begin(self.model.steps_per_execution == 1 or equal_steps)
        self._learning_rate = learning_rate_of(self.model.optimizer)
        if self._resumed is not None:
            self._restore(self._resumed)
        self._last_seconds = time.monotonic()
        self._leaving.begin()
        self._plan()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Local: batches that were done before are read and not used."""
        keras_private.set_initial_epoch(self.model, None)  # it is for one `fit`
        if not self._is_resumed_epoch:
            self._now = Position(epoch, 0, 0, self._now.steps)
        elif self._dealt is None and self.position.step:
            self._pass_over(self.position.step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective when some rank wishes something: a checkpoint, or the end of the job."""
        step = batch + 1
        if step <= self._now.step:
            return  # done before
        samples = 0
        if self._dealt is not None:
            done = self._now.samples + (step - self._now.step) * self._dealt.per_step
            samples = min(done, self._dealt.samples)
        is_first = self._now.steps == self.position.steps
        self._now = Position(self._now.epoch, step, samples, self._now.steps + step - self._now.step)
        self._world.activity.steps = self._now.steps
        if is_first and self._world.is_root:  # the watchdog tells of later ones, now and then
            marks.tell("step", self._world.rank, self._now.steps)
        self._add_metrics()
        self._answer(self._requests_after_step())
        self._plan()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective: the position is the beginning of the next epoch; a checkpoint of it if it is time, or good."""
        self._resumed, self._is_resumed_epoch = None, False
        self._now = Position(epoch + 1, 0, 0, self._now.steps)
        for name, value in (logs or {}).items():
            if np.ndim(value) == 0:
                self._history.setdefault(name, []).append(float(value))
        quality = self._quality(logs or {})
        if quality is None and self._options.best is not None:
            found = ", ".join(self._history)
            raise AgreedError(
                f"--checkpoint-best {self._options.best}: there is no such number, only {found}: name one"
            )
        # The logs are those of all ranks, so every rank comes to the same.
        better = quality is not None and (self._best is None or quality.cost < self._best.cost)
        last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        if self._world.is_root:
            # Only rank 0 wishes: the others get it with the requests, and all save or none.
            self._requests.save |= better or last or self._options.every == "epoch"
            if last:
                self._writer.wait()
            elif self._requests.save and self._writer.busy:
                tell(f"no checkpoint of epoch {epoch + 1}: the one before is still being written")
        self._answer(self._requests.now(f"end of epoch {epoch + 1}"), quality)
        if better and self._saved == self._now:
            self._best = quality
        self._plan()

    def on_train_end(self, logs: Any = None) -> None:
        """Collective: wait until everything is written; leave, if a signal has come meanwhile."""
        if self._world.is_root:
            self._writer.wait()
        self._requests.save = False
        self._answer(self._requests.now("end of training"))
        self.close()

    def close(self) -> None:
        """Local: signals do what they did before `fit`; what is being written is finished."""
        self._leaving.end()
        self._requests.clear()

    # What is to be done.

    def _plan(self) -> None:
        """Local: rank 0 finds out whether there should be a checkpoint after the next step."""
        if self._world.is_root:
            every, seconds = self._options.every_steps, self._options.every_seconds
            # What is asked for now goes with the header of the next step, and is done at its end.
            after_next = self._now.steps + self.model.steps_per_execution
            if every is not None:
                self._requests.save |= after_next // every > self._now.steps // every
            if seconds is not None:
                self._requests.save |= time.monotonic() - self._last_seconds >= seconds
        self._requests.tell()

    def _requests_after_step(self) -> list[int]:
        """Local: what all ranks wanted at this step, if they are going to make another."""
        return [] if self._is_nearly_over() else self._requests.after_step()

    def _is_nearly_over(self) -> bool:
        """Local: whether the epoch ends in less than a step, so that not every rank would have data to go on with."""
        if self._dealt is not None:
            return self._dealt.samples - self._now.samples < self._world.size
        return bool(self._now.step == self.params.get("steps"))

    def _answer(self, requests: Sequence[int], quality: Quality | None = None) -> None:
        """Collective when there is anything to do: the same on all ranks, since they got the same requests."""
        signals = [request >> 1 for request in requests]
        if any(signals):
            self._leave(signals, quality)
        elif any(request & SAVE for request in requests):
            self._save(quality)

    def _leave(self, signals: Sequence[int], quality: Quality | None) -> None:
        """Collective: write what there is, and go.

        Raises:
            StoppedBySignal: always.
        """
        number = next(number for number in signals if number)
        if self._world.is_root:
            self._writer.wait()
        if self._saved != self._now:
            self._save(quality)
        # All leave with the same exit code, which says whether there is a checkpoint.
        saved = self._world.communicator.broadcast_obj(self._world.is_root and self._writer.wait())
        if self._world.is_root:
            what = f"a checkpoint is in {self._store.directory}" if saved else "NO CHECKPOINT COULD BE WRITTEN"
            tell(f"{where_from(signals, self._world.hosts)}; all ranks have stopped at {self._now}; {what}")
        self._requests.clear()
        raise self._leaving.leave(number, saved)

    # What is written.

    def _save(self, quality: Quality | None) -> None:
        """Collective: take a snapshot, and let rank 0 write it while training goes on."""
        # Nothing is being written now: see `Requests.tell` and `_leave`.
        arrays = self._arrays = state.capture(self.model, self._world, self._arrays)
        self._requests.save, self._saved, self._last_seconds = False, self._now, time.monotonic()
        if not self._world.is_root:
            return
        info = {
            "position": self._now.as_info(),
            "ranks": self._world.size,
            "order": self._dealt and {"samples": self._dealt.samples, "seed": self._dealt.seed},
            "stopped": bool(self.model.stop_training),
            "history": {name: list(values) for name, values in self._history.items()},
            "quality": quality and {"metric": quality.metric, "value": quality.value},
            "learning rate": self._learning_rate,
            "counters": [counters_of(callback) for callback in self._callbacks],
            "all_reduce": self._world.all_reduce.chosen,
            "names": state.labels_of(self.model),
            "run": dict(self._options.run),
        }
        values = [(item.variable, arrays[item.key]) for item in state.items_of(self.model)]
        write_model = functools.partial(save_keras, self.model, values)
        snapshot, steps = Snapshot(arrays, info), self._now.steps

        def write() -> None:
            self._store.write(snapshot, write_model)
            marks.tell("saved", self._world.rank, steps)

        self._writer.start(write)

    def _quality(self, logs: dict[str, Any]) -> Quality | None:
        default = "val_loss" if "val_loss" in logs else "loss"
        metric = self._options.best or default
        return Quality(metric, float(logs[metric])) if metric in logs else None

    # What is read.

    def _refuse_unfit(self) -> None:
        """Collective: the model can be saved and restored.

        Raises:
            AgreedError: on all ranks.
        """

        def check() -> None:
            model, resumed = self.model, self._resumed
            if getattr(model, "optimizer", None) is None:
                raise UsageError("checkpoints need a model that was compiled with an optimizer")
            if self._world.exchanges and hook_of(model.optimizer) is None:
                raise UsageError("the callback Checkpoint must stand behind DataParallel in the list of callbacks")
            if resumed is not None:
                if not model.built:
                    raise UsageError(
                        f"{resumed.source} cannot be restored into a model without weights: call the model on one "
                        "batch before fit"
                    )
                if not model.optimizer.built:
                    model.optimizer.build(model.trainable_variables)
                state.check_fits(model, resumed.arrays, resumed.info["names"], resumed.source)

        run_on_all(self._world.communicator, self._world.hosts, check)

    def _restore(self, resumed: Resumption) -> None:
        """Collective: everything becomes what it was."""
        rate = self._learning_rate
        state.restore(self.model, resumed.arrays, resumed.ranks, self._world)
        scale_learning_rate(self.model.optimizer, rate, resumed.info["learning rate"])
        mark_synchronized(self.model)
        if resumed.ranks == self._world.size and not self._world.all_reduce.chosen and resumed.info["all_reduce"]:
            self._world.all_reduce.choose(resumed.info["all_reduce"])
        for callback, counters in zip(self._callbacks, resumed.info["counters"], strict=False):
            set_counters(callback, counters)
        self._history = {name: list(values) for name, values in resumed.info["history"].items()}
        history = getattr(self.model, "history", None)
        if history is not None:
            history.history = {name: list(values) for name, values in self._history.items()}
        best = self._world.communicator.broadcast_obj(self._store.best() if self._world.is_root else None)
        self._best = best[1] if best is not None else None
        if self._dealt is None:
            epochs = self.params.get("epochs", 0)
            keras_private.set_initial_epoch(self.model, epochs if self.finished else self.position.epoch)
        self._world.activity.steps = self.position.steps
        if self._world.is_root:
            marks.tell("resumed", self._world.rank, self.position.steps)
        over = self.finished or self.position.epoch >= self.params.get("epochs", 0)
        what = "the run is over, and nothing is left to train:" if over else "goes on from"
        self._say(f"{what} {resumed.source}: {self.position} (written by {counted(resumed.ranks, 'rank')})")
        if self.differences:
            self._say(f"goes on with others than before: {'; '.join(self.differences)}")
        if not self.position.step:
            self._resumed = None  # else the metrics follow, once they exist

    def _pass_over(self, steps: int) -> None:
        """Local: the next `steps` batches are read, and nothing else is done with them.

        The metrics of the epoch go on right then: of unknown length, it may have no step left, and its numbers are
        those of the logs only where these have the names of all metrics.
        """
        model, train = self.model, self.model.train_function
        left = steps

        def read(iterator: Any) -> dict[str, Any]:
            nonlocal left
            batch = [next(iterator) for _ in range(model.steps_per_execution)][-1]
            left -= model.steps_per_execution
            if left > 0:
                return {}
            model.train_function = train
            build(model, batch)
            saved = sum(key.startswith("metric/") for key in self._resumed.arrays) if self._resumed is not None else 0
            if len(state.metrics_of(model)) != saved:
                return {}  # a model without a usable `call`: the rest is made by its first step
            self._add_metrics()
            return dict(type(model).get_metrics_result(model))  # of this rank: some may have fewer batches

        model.train_function = read

    def _add_metrics(self) -> None:
        """Local: once, what the metrics of this epoch had counted before."""
        if self._resumed is not None:
            state.add_metrics(self.model, self._resumed.arrays, self._resumed.ranks, self._world)
            self._resumed = None

    def _say(self, text: str) -> None:
        if self._world.is_root:
            tell(text)
