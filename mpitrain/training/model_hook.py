"""What is patched into one model: its training step, and how it tells its metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from mpitrain.runtime import keras_private
from mpitrain.strategies.strategy import Strategy, strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.compiled_step import compiled_train_step
from mpitrain.training.counting import Counted
from mpitrain.training.first_batches import FirstBatches
from mpitrain.training.latest_step import LatestStep
from mpitrain.training.logs import Logs, global_metrics, leaves_of
from mpitrain.training.loss_shares import LossIs, Shares
from mpitrain.training.metric_states import observe
from mpitrain.training.model_state import build, synchronize_before_trace
from mpitrain.training.optimizer import DistributedOptimizer, hook_of
from mpitrain.training.shown_metrics import of_this_rank
from mpitrain.world.world import World

ATTRIBUTE = "_mpitrain_hook"


class ModelHook:
    """The hook of one model.

    Attributes:
        active: how many `fit` and `evaluate` with the callback are running, one within the other.
        synchronized: variables are those of rank 0 already.
        logs: the numbers of its steps over all ranks.
        latest: what is known of its latest step.
        told_of_counts: it was said that nobody knows how to combine what layers of the script count.
    """

    told_of_counts = False

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self.active = 0
        self._model, self._strategy = model, strategy
        self.shares = Shares(model, strategy, lambda: self.active > 0)
        self._optimizer: Any = None
        self._depth = 0
        self.latest = LatestStep(strategy)
        self._first_batches = FirstBatches(strategy.world.activity)
        self.synchronized = False
        self._shown_result: Callable[[], dict[str, Any]] = model.get_metrics_result
        self._result_or_logs: Callable[[Any], Any] = getattr(model, keras_private.LOGS_OF_EPOCH)
        self.logs = Logs(lambda: model.metrics, self._metrics_result, strategy.world, lambda: self.latest.has_rows)
        self._own_train_step = self._train_step = self.logs.noted("train", model.train_step)
        self._test_step = self.logs.noted("test", model.test_step)

    def _prepare(self) -> None:
        """Local: at the first use, and after each new `compile`: cut a compiled step at the exchange."""
        model = self._model
        # A new `compile`: what was traced has the old optimizer in it, and the new one's state is not rank 0's yet.
        if model.jit_compile or model.optimizer is not self._optimizer:
            self.synchronized, self._train_step = False, self._own_train_step
            model.train_function = model.test_function = None
        self._optimizer = model.optimizer
        if model.jit_compile:
            model.jit_compile = False
            optimizer_hook = hook_of(model.optimizer) if model.optimizer is not None else None
            plain_step = type(model).train_step is keras.Model.train_step
            if plain_step and optimizer_hook is not None and not optimizer_hook.accumulation_steps:
                step = self._own_train_step
                self._train_step = compiled_train_step(step, optimizer_hook, lambda: model.weights)

    def compile(self, compiled: bool) -> None:
        """Local: from the next step on XLA compiles the training step, or does not; all ranks say so after one step."""
        synchronized, self._train_step = self.synchronized, self._own_train_step
        self._model.jit_compile = compiled
        self._prepare()
        self.synchronized = synchronized  # the variables are what they were
        self._model.make_train_function(force=True)

    def share(self, loss_is: LossIs | None, sync_batch_norm: bool) -> None:
        """Local: see `Shares`; what was traced otherwise is traced again."""
        shares = self.shares
        if (shares.loss_is, shares.sync_batch_norm) != (loss_is, sync_batch_norm):
            self._model.train_function = self._model.test_function = None
        shares.loss_is, shares.sync_batch_norm = loss_is, sync_batch_norm

    @classmethod
    def of(cls, model: Any, strategy: Strategy) -> ModelHook:
        """Local: the hook of `model`, made and patched in if it has none."""
        if ATTRIBUTE not in model.__dict__:
            hook = cls(model, strategy)
            # object.__setattr__: Keras tracks what is assigned to a model; this is none of its state.
            object.__setattr__(model, ATTRIBUTE, hook)
            object.__setattr__(model, "train_step", hook.train_step)
            object.__setattr__(model, "test_step", hook.test_step)
            object.__setattr__(model, "get_metrics_result", hook.metrics_result)
            object.__setattr__(model, keras_private.LOGS_OF_EPOCH, hook.result_or_logs)
        found: ModelHook = model.__dict__[ATTRIBUTE]
        found._prepare()
        return found

    def train_step(self, data: Any) -> Any:
        """Collective: the model's training step, its gradients weighted by the samples of `data`."""
        counted = Counted.of(data)
        if not self.synchronized:
            self.synchronized = True
            synchronize_before_trace(self._model, counted.data, self._strategy.world)
        if counted.share is None:
            self._first_batches.note(counted.data)
        else:  # rows that are alike, as of constant test data, say nothing
            self._strategy.world.activity.divided = True
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
    def activate(self) -> Iterator[None]:
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

    def _metrics_result(self) -> dict[str, Any]:
        """Local: of this rank's own states."""
        with of_this_rank():
            return self._shown_result()

    def metrics_result(self) -> dict[str, Any]:
        """Collective when Keras asks at the end of an epoch or evaluation; Local inside a step."""
        if self._depth:
            return self._metrics_result()
        if not self.active:
            return self._shown_result()
        self._strategy.join()
        return self.global_result()

    def result_or_logs(self, logs: Any) -> Any:
        """Collective at the end of an epoch or evaluation, where Keras takes metrics or, of other names, its logs."""
        if self._depth or not self.active:
            return self._result_or_logs(logs)
        self._strategy.join()
        world, own = self._strategy.world, leaves_of(logs)
        world.agreement.call("names in logs")
        batches = self.latest.batches
        # A rank without data has no logs, and learns from the others which values it takes part in.
        everyone = world.communicator.all_gather_obj(([*(logs or {})], [*own], batches))
        if {name for names, _, _ in everyone for name in names} == set(self._metrics_result()):
            return self.global_result()
        paths = list(dict.fromkeys(path for _, paths, _ in everyone for path in paths))
        world.agreement.call(self.logs.call(paths))
        in_the_last = batches == max(batches for _, _, batches in everyone)
        return self.logs.reduce(paths, own, self.latest.samples if in_the_last else 0.0)

    def global_result(self) -> dict[str, Any]:
        """Collective: the model's metrics over the samples of all ranks."""
        return global_metrics(self._model.metrics, self._metrics_result, self._strategy.world)


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
        loss_is: see `loss_shares.Shares`.
        sync_batch_norm: likewise.
    """
    as_dictionary = arguments.get("return_dict", False)
    # Before the hook, which cuts a compiled step at this optimizer's exchange.
    DistributedOptimizer(model.optimizer, world=world)
    hook = ModelHook.of(model, strategy_of(world))
    hook.share(loss_is, sync_batch_norm)
    with hook.activate():
        logs = train(model, **{**arguments, "return_dict": True})
    own = leaves_of(logs)
    world.agreement.call(hook.logs.call(own))
    logs |= hook.logs.reduce(list(own), own, hook.latest.samples)
    return logs if as_dictionary else keras_private.numbers_in_order(model, logs)


def test_on_whole_batch(model: Any, test: Callable[..., Any], arguments: dict[str, Any], world: World) -> Any:
    """Collective: `Model.test_on_batch` of a Keras that does not forget before it what metrics saw.

    Each rank computes the whole batch. Rank 0 keeps it in its metrics, so that over all ranks it counts once.

    Args:
        model: compiled.
        test: `Model.test_on_batch` of Keras.
        arguments: its arguments by name.
        world: the job.
    """
    hook = ModelHook.of(model, strategy_of(world))
    variables = [variable for metric in model.metrics for variable in metric.variables]
    before = {id(variable): variable.numpy() for variable in variables}  # two of one path may be of two metrics
    logs = test(model, **{**arguments, "return_dict": True})
    for metric in model.metrics if not world.is_root else ():
        if not set(map(id, metric.variables)) <= before.keys():
            metric.reset_state()  # made by this call
            continue
        for variable in metric.variables:
            variable.assign(before[id(variable)])
    results = hook.global_result()
    if logs.keys() == results.keys():
        logs = results
    return logs if arguments.get("return_dict") else keras_private.numbers_in_order(model, logs)


def compile_step(model: Any, compiled: bool) -> None:
    """Local: see `ModelHook.compile`; also of a model that one rank trains."""
    if ATTRIBUTE in model.__dict__:
        hook_in(model).compile(compiled)
    else:
        model.jit_compile = compiled
        model.make_train_function(force=True)


def hook_in(model: Any) -> ModelHook:
    """Local: what is patched into a model of which `DataParallel` has been told."""
    hook: ModelHook = model.__dict__[ATTRIBUTE]
    return hook


def mark_synchronized(model: Any) -> None:
    """Local: variables have the values of a checkpoint on all ranks; the first step leaves them so."""
    if ATTRIBUTE in model.__dict__:
        model.__dict__[ATTRIBUTE].synchronized = True
