"""What a Keras `fit` needs to be data-parallel, as one callback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.faults.activity import Phase
from mpitrain.strategies.exchange import Exchange, exchange_of
from mpitrain.strategies.hooks import hook_of
from mpitrain.strategies.replicas import average_statistics, verify_replicas
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.compiled import split_train_step
from mpitrain.training.counting import Counted
from mpitrain.training.first_batches import FirstBatches
from mpitrain.training.latest_step import LatestStep
from mpitrain.training.logs import Logs, epoch_logs, global_metrics, leaves_of
from mpitrain.training.metric_states import observe
from mpitrain.training.model_state import (
    build,
    replicated,
    settle_statistics,
    start_alike,
    statistics,
    step_counters,
    synchronize_before_trace,
)
from mpitrain.training.optimizer import DistributedOptimizer
from mpitrain.training.shares import LossIs, Shares
from mpitrain.world.start import current_world
from mpitrain.world.world import World

ATTRIBUTE = "_mpitrain_hook"


class DataParallel(keras.callbacks.Callback):
    """Makes `fit` and `evaluate` of one model data-parallel. Stands first in the list of callbacks.

    It averages the gradients (the optimizer is made a DistributedOptimizer if it is none yet),
    weighted by the samples of each rank's batch; gives all ranks rank 0's variables before the first
    step; lets ranks that run out of data take part in the updates of the others; puts the metrics of
    all ranks' samples into `logs`, as sum and count, so that later callbacks decide alike on all
    ranks; averages the statistics of batch normalization before they are used; and checks that
    replicas are identical.

    Every rank calls `fit` and `evaluate` with it, in the same order.

    Args:
        verify_replicas: check after the first step and after each epoch that is a multiple of this;
            0 checks never.
        world: the job; the current one by default.
        loss_is: what a loss is that Keras does not compute, or computes of a whole batch: see `shares.Shares`.
        sync_batch_norm: batch normalization uses the moments of all ranks' rows.
    """

    def __init__(
        self,
        verify_replicas: int = 1,
        *,
        world: World | None = None,
        loss_is: LossIs | None = "mean",
        sync_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._steps_are = loss_is, sync_batch_norm
        self._world = world or current_world()
        self._exchange = exchange_of(self._world)
        self._verify_every = verify_replicas
        self._unverified = self._goes_on = False
        self._spare: Any = None
        self._hook: _ModelHook | None = None
        self._phases: list[Phase] = []  # before each evaluation under way

    def go_on(self, training: bool) -> None:
        """Local: after the loss of ranks, when variables are the same on all that are left.

        Args:
            training: a `fit` follows, and no evaluation.
        """
        self._phases.clear()
        self._unverified, self._spare, self._goes_on = False, None, True
        self._world.activity.phase = "compute" if training else "start"
        if self._hook is not None:
            self._hook.active, self._hook.synchronized = int(training), True
            optimizer_hook = hook_of(self.model.optimizer)
            if optimizer_hook is not None:
                optimizer_hook.synchronized = True

    def begin_without_data(self, dataset: Any) -> None:
        """Local: the next epoch has fewer samples than there are ranks, and `dataset` may be empty on this one.

        A rank without data takes part in updates that it has traced; so it makes a step without data. All ranks call
        this, since not all will come to the end of a first step.
        """
        self._spare = dataset

    def set_model(self, model: Any) -> None:
        """Local: hook the optimizer and the model's steps, before Keras traces them."""
        super().set_model(model)
        if self._world.exchanges:
            if getattr(model, "optimizer", None) is not None:
                DistributedOptimizer(model.optimizer, world=self._world)
            self._hook = _ModelHook.of(model, self._exchange)
            self._hook.share(*self._steps_are)

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective: all ranks start from rank 0's variables, where they exist already."""
        self._world.activity.phase = "start"  # until the first update: tracing takes long
        if self._hook is not None:
            # With several steps a call, a rank's first call may hold fewer updates than another's.
            in_step = self._exchange.in_step and self.model.steps_per_execution == 1
            self._unverified = self._verify_every > 0 and in_step
            self._hook.active += 1
            start_alike(self.model, self._world)
            optimizer_hook = hook_of(self.model.optimizer)
            if optimizer_hook is not None and not self._goes_on:
                optimizer_hook.begin_anew()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Collective where ranks may have no data at all: trace the update."""
        if self._spare is not None and self._hook is not None:
            dataset, self._spare, self._unverified = self._spare, None, False
            if not int(dataset.cardinality()):
                counters = [(counter, counter.numpy()) for counter in step_counters(self.model.optimizer)]
                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    self.model.train_function(iter(dataset))
                for counter, number in counters:  # see _end_epoch_alike
                    counter.assign(number)

    def on_train_end(self, logs: Any = None) -> None:
        """Local: metrics are this rank's own again."""
        self._world.activity.phase = "start"  # of whatever comes now
        if self._hook is not None:
            self._hook.active -= 1
            optimizer_hook = hook_of(self.model.optimizer)
            if optimizer_hook is not None and self._world.is_root:
                optimizer_hook.fetch_state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective, once after the first step: replicas are identical. Local: the loss is finite.

        Raises:
            NonFiniteError: it is not, and that is to end the job.
        """
        loss = (logs or {}).get("loss")
        if loss is not None and not np.isfinite(loss):
            self._exchange.reducer.finite.note_loss(float(loss), self._world.activity.updates, self._world.hosts)
        if self._unverified:
            self._unverified = False
            verify_replicas(replicated(self.model), "after the first step", world=self._world)

    def on_test_begin(self, logs: Any = None) -> None:
        """Collective: statistics become the same before they are used."""
        self._phases.append(self._world.activity.phase)
        self._world.activity.phase = "evaluation"
        if self._hook is not None:
            self._hook.active += 1
            self._hook.latest.begin_test()
            settle_statistics(self.model, self._hook.shares.synchronized_layers, self._exchange)

    def on_test_end(self, logs: Any = None) -> None:
        """Local: metrics are this rank's own again, unless this was within a `fit`."""
        if self._phases:
            self._world.activity.phase = self._phases.pop()
        if self._hook is not None:
            self._hook.active -= 1
            self._hook.latest.end_test()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective: numbers in `logs` become those of all ranks; replicas are checked."""
        if self._hook is None:
            return
        self._exchange.join()
        if logs is not None:
            logs.update(epoch_logs(logs, self._hook.latest.samples, self._world))
        self._end_epoch_alike()
        settle_statistics(self.model, self._hook.shares.synchronized_layers, self._exchange)
        if self._verify_every and (epoch + 1) % self._verify_every == 0:
            verify_replicas(replicated(self.model), f"after epoch {epoch + 1}", world=self._world)

    def _end_epoch_alike(self) -> None:
        """Collective: one rank that stops stops all, and all have counted the same number of steps.

        Where Keras does not know the number of batches, it finds the end by a step without data, and
        TensorFlow counts that step (seen with 2.21 and Keras 3.15, also without mpitrain: 5 steps for 4
        batches). A rank that stops before its end has not counted it.
        """
        optimizer = self.model.optimizer
        hook = hook_of(optimizer)
        counters = []
        if hook is not None and not hook.accumulation_steps:
            counters = step_counters(optimizer)
        self._world.agreement.call("end of an epoch")
        numbers = np.array([self.model.stop_training, *[c.numpy() for c in counters]], np.int64)
        self._world.communicator.all_reduce(numbers, "max")
        self.model.stop_training = bool(numbers[0])
        for counter, number in zip(counters, numbers[1:], strict=True):
            counter.assign(number)


class _ModelHook:
    """What is patched into one model: its training step, and how it tells its metrics.

    Attributes:
        active: how many `fit` and `evaluate` with the callback are running, one within the other.
        synchronized: variables are those of rank 0 already.
        logs: the numbers of its steps over all ranks.
        latest: what is known of its latest step.
    """

    def __init__(self, model: Any, exchange: Exchange) -> None:
        self.active = 0
        self._model, self._exchange = model, exchange
        self.shares = Shares(model, exchange.world, lambda: self.active > 0)
        self._optimizer: Any = None
        self._depth = 0
        self.latest = LatestStep(exchange)
        self._first_batches = FirstBatches(exchange.world.activity)
        self.synchronized = False
        self._metrics_result: Callable[[], dict[str, Any]] = model.get_metrics_result
        self._result_or_logs: Callable[[Any], Any] = model._get_metrics_result_or_logs
        self.logs = Logs(lambda: model.metrics, self._metrics_result, exchange.world, lambda: self.latest.has_rows)
        self._train_step: Callable[[Any], Any] = model.train_step
        self._own_train_step = self._train_step
        self._test_step: Callable[[Any], Any] = model.test_step

    def _prepare(self) -> None:
        """Local: at the first use, and after each new `compile`: cut a compiled step at the exchange."""
        model = self._model
        if model.jit_compile or model.optimizer is not self._optimizer:
            self.synchronized, self._train_step = False, self._own_train_step
            model.train_function = model.test_function = None
        self._optimizer = model.optimizer
        if model.jit_compile:
            model.jit_compile = False
            optimizer_hook = hook_of(model.optimizer) if model.optimizer is not None else None
            plain_step = type(model).train_step is keras.Model.train_step
            if plain_step and optimizer_hook is not None and not optimizer_hook.accumulation_steps:
                self._train_step = split_train_step(self._own_train_step, optimizer_hook)

    def share(self, loss_is: LossIs | None, sync_batch_norm: bool) -> None:
        """Local: see `Shares`; what was traced otherwise is traced again."""
        shares = self.shares
        if (shares.loss_is, shares.sync_batch_norm) != (loss_is, sync_batch_norm):
            self._model.train_function = self._model.test_function = None
        shares.loss_is, shares.sync_batch_norm = loss_is, sync_batch_norm

    @classmethod
    def of(cls, model: Any, exchange: Exchange) -> _ModelHook:
        """Local: the hook of `model`, made and patched in if it has none."""
        if ATTRIBUTE not in model.__dict__:
            hook = cls(model, exchange)
            # object.__setattr__: Keras tracks what is assigned to a model; this is none of its state.
            object.__setattr__(model, ATTRIBUTE, hook)
            object.__setattr__(model, "train_step", hook.train_step)
            object.__setattr__(model, "test_step", hook.test_step)
            object.__setattr__(model, "get_metrics_result", hook.metrics_result)
            object.__setattr__(model, "_get_metrics_result_or_logs", hook.result_or_logs)
        found: _ModelHook = model.__dict__[ATTRIBUTE]
        found._prepare()
        return found

    def train_step(self, data: Any) -> Any:
        """Collective: the model's training step, its gradients weighted by the samples of `data`."""
        counted = Counted.of(data)
        if not self.synchronized:
            self.synchronized = True
            synchronize_before_trace(self._model, counted.data, self._exchange.world)
        if counted.share is None:  # else it is known that ranks read the same, and divide it
            self._first_batches.note(counted.data)
        steps = getattr(self._model.optimizer, "gradient_accumulation_steps", None)
        self.latest.note_training(counted.samples, counted.share is not None and bool(steps))
        with sample_count(counted.samples), self.shares.step(training=True):
            return self._step(self._train_step, counted)

    def test_step(self, data: Any) -> Any:
        """Collective where a loss is no mean over rows: the model's own."""
        counted = Counted.of(data)
        if not counted.always:
            build(self._model, counted.data)
        self.latest.note_test(counted.samples)
        with sample_count(counted.samples), self.shares.step(training=False):
            return self._step(self._test_step, counted)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Local: all ranks run the steps of the model."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def _step(self, step: Callable[[Any], Any], counted: Counted) -> Any:
        self._depth += 1
        observe(self._model.metrics)
        try:
            with counted.keeping(self._metric_variables):
                logs = step(counted.data)
            self.latest.note_logs(logs, counted.data)
            return logs
        finally:
            self._depth -= 1

    def _metric_variables(self) -> list[Any]:
        return [variable for metric in self._model.metrics for variable in metric.variables]

    def metrics_result(self) -> dict[str, Any]:
        """Collective when Keras asks at the end of an epoch or evaluation; Local inside a step."""
        if self._depth or not self.active:
            return self._metrics_result()
        self._exchange.join()
        return self.global_result()

    def result_or_logs(self, logs: Any) -> Any:
        """Collective at the end of an epoch or evaluation, where Keras takes metrics or, of other names, its logs."""
        if self._depth or not self.active:
            return self._result_or_logs(logs)
        self._exchange.join()
        world, own = self._exchange.world, leaves_of(logs)
        world.agreement.call("names in logs")
        batches = self.latest.batches
        everyone = world.communicator.all_gather_obj(([*(logs or {})], [*own], batches))
        if {name for names, _, _ in everyone for name in names} == set(self._metrics_result()):
            return self.global_result()
        paths = list(dict.fromkeys(path for _, paths, _ in everyone for path in paths))
        world.agreement.call(self.logs.call(paths))
        in_the_last = batches == max(batches for _, _, batches in everyone)
        return self.logs.reduce(paths, own, self.latest.samples if in_the_last else 0.0)

    def global_result(self) -> dict[str, Any]:
        """Collective: the model's metrics over the samples of all ranks."""
        return global_metrics(self._model.metrics, self._metrics_result, self._exchange.world)


def train_on_rows(
    model: Any,
    train: Callable[..., Any],
    arguments: dict[str, Any],
    world: World,
    loss_is: LossIs | None = "mean",
    sync_batch_norm: bool = False,
) -> Any:
    """Collective: `Model.train_on_batch` where each rank has its own rows; the numbers returned are those of all.

    Args:
        model: compiled.
        train: `Model.train_on_batch` of Keras.
        arguments: its arguments by name.
        world: the job.
        loss_is: see `shares.Shares`.
        sync_batch_norm: likewise.
    """
    as_dictionary = arguments.get("return_dict", False)
    DistributedOptimizer(model.optimizer, world=world)
    hook = _ModelHook.of(model, exchange_of(world))
    hook.share(loss_is, sync_batch_norm)
    with hook.together():
        logs = train(model, **{**arguments, "return_dict": True})
    own = leaves_of(logs)
    world.agreement.call(hook.logs.call(own))
    logs |= hook.logs.reduce(list(own), own, hook.latest.samples)
    return logs if as_dictionary else model._flatten_metrics_in_order(logs)


def hook_in(model: Any) -> _ModelHook:
    """Local: what is patched into a model of which `DataParallel` has been told."""
    hook: _ModelHook = model.__dict__[ATTRIBUTE]
    return hook


def begun_alike(model: Any) -> None:
    """Local: variables have the values of a checkpoint on all ranks; the first step leaves them so."""
    if ATTRIBUTE in model.__dict__:
        model.__dict__[ATTRIBUTE].synchronized = True


def average_batch_statistics(model: Any, world: World) -> None:
    """Collective: moments of batch normalization become the mean over ranks."""
    average_statistics(statistics(model), world=world)
