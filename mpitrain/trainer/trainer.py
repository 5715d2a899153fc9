"""Trains one Keras model on one source of data, on all ranks, from `compile` to the saved file."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import keras

from mpitrain.checkpoint.callback import Checkpoint
from mpitrain.checkpoint.options import CheckpointOptions, Dealt, Position
from mpitrain.checkpoint.output import MODEL_NAME, prepare_directory, save_model, save_summary
from mpitrain.data.load import Data
from mpitrain.data.sharding import without_autotuning
from mpitrain.data.source import DataSource
from mpitrain.errors import AgreedError, DataError
from mpitrain.observe.progress import ProgressDisplay
from mpitrain.runtime import launcher
from mpitrain.runtime.counted import counted
from mpitrain.runtime.terminal import launchers_terminal
from mpitrain.strategies.parameter_server.counts import ServerCounts, server_counts
from mpitrain.strategies.strategy import strategy_of
from mpitrain.trainer.damage import locate_damaged_sample
from mpitrain.trainer.data import load_data
from mpitrain.trainer.objective import check_best, check_compiled, check_fits, objective
from mpitrain.trainer.reporting import Report
from mpitrain.trainer.run_callbacks import RunCallbacks
from mpitrain.trainer.shrinkable_run import COUNTING, EVALUATION, SAVING, TIMES, TRAINING, LostRanks, ShrinkableRun
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.jit_choice import JitChoice
from mpitrain.world.consensus import run_on_all, run_on_root
from mpitrain.world.start import current_world
from mpitrain.world.world import World


@dataclass(frozen=True)
class Times:
    """Where the seconds of `fit` went: means over ranks."""

    total: float  # all of them, with the tracing of the graph and the validation
    exchange: float  # in the exchange of gradients
    waiting: float  # until the slowest rank had come

    @property
    def compute(self) -> float:
        """The rest. Where the exchange runs beside the backward pass, what both did counts as exchange."""
        return max(0.0, self.total - self.exchange - self.waiting)


@dataclass(frozen=True)
class Summary:
    """What came of a training run, the same on all ranks."""

    history: dict[str, list[float]]  # numbers of each epoch, over the samples of all ranks
    evaluated_on: str  # `test`, or where there are no test samples `validation`, or `training`
    results: dict[str, float]  # loss and metrics there, after the last epoch
    samples: int  # training samples of all ranks, in all epochs
    times: Times  # where the time went
    model_path: Path | None  # the saved model, if one was
    servers: ServerCounts | None = None  # what parameter servers counted, where there are any
    losses: tuple[LostRanks, ...] = ()  # of ranks, after which the others went on

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, over the whole of `fit`."""
        return self.samples / self.times.total


Jit = Literal["keras", "on", "off", "auto"]


class Trainer:
    """Compiles a model for a source of data, trains it on all ranks, evaluates and saves it.

    Args:
        model: a Keras model, with or without weights; rank 0's weights are taken.
        optimizer: what `compile` takes; its learning rate is used as it is. None leaves the model as it was compiled.
        loss: what `compile` takes; chosen from the labels and the model's output by default.
        metrics: as `loss`.
        batch_size: of each rank.
        epochs: passes over the training samples.
        callbacks: Keras callbacks, called on every rank with the numbers of all ranks.
        checkpoints: the directory where the run is saved while it goes on, and from where it goes on, or a
            `callbacks.CheckpointOptions`; nowhere by default.
        verify_replicas: see `callbacks.DataParallel`.
        sync_batch_norm: likewise.
        jit: whether XLA compiles training steps: `keras` (as Keras decides), `on`, `off`, or `auto` (if the first
            steps show that it is faster).
        progress: show progress on rank 0.
        world: the job; the current one by default.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, activation="softmax")])
        >>> trainer = mpitrain.Trainer(model, batch_size=4, epochs=2, progress=False)
        >>> summary = trainer.fit((np.eye(8), np.arange(8) % 2))
        >>> summary.evaluated_on, len(summary.history["loss"])
        ('validation', 2)
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Any = "adam",
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        callbacks: Sequence[Any] = (),
        checkpoints: CheckpointOptions | Path | str | None = None,
        verify_replicas: int = 1,
        sync_batch_norm: bool = False,
        jit: Jit = "keras",
        progress: bool = True,
        world: World | None = None,
    ) -> None:
        self.world = world or current_world()
        self.model = model
        self._optimizer, self._loss, self._metrics = optimizer, loss, metrics
        self._batch_size, self._epochs = batch_size, epochs
        self._callbacks = list(callbacks)
        self._checkpoints = CheckpointOptions(Path(checkpoints)) if isinstance(checkpoints, str | Path) else checkpoints
        self._verify_replicas, self._sync_batch_norm, self._progress = verify_replicas, sync_batch_norm, progress
        self._jit = jit

    @property
    def keeps_compiled(self) -> bool:
        """Whether the model stays as it was compiled."""
        return self._optimizer is None

    def fit(self, source: DataSource | Data, output: Path | str | None = None) -> Summary:
        """Collective: train, evaluate and save.

        Args:
            source: from `load_data`, or what that takes.
            output: an existing directory for the model and a summary; nothing is saved without it.

        Raises:
            AgreedError: on every rank: the model does not fit the data, there are fewer samples to
                evaluate than ranks, or the files cannot be written.
        """
        world = self.world
        source = source if isinstance(source, DataSource) else load_data(source, world=world)
        run = ShrinkableRun(world, self.model, source, self._batch_size, self._callbacks)
        run_on_all(world.communicator, world.hosts, lambda: self._compile(source, run))
        if self._jit != "keras":
            self.model.jit_compile = self._jit == "on"
        parallel = DataParallel(self._verify_replicas, world=world, sync_batch_norm=self._sync_batch_norm)
        checkpoint = None if self._checkpoints is None else self._checkpoint(source, self._checkpoints)
        begin = Position() if checkpoint is None else checkpoint.position
        history, times = self._train(run, parallel, checkpoint, begin)
        results, evaluated_on = run.stage(EVALUATION, lambda: self._evaluate(run.source, parallel, history))
        epochs = len(next(iter(history.values()), [])) - begin.epoch
        samples = source.train_count * epochs - begin.samples
        counts = run.stage(COUNTING, lambda: server_counts(self.model, world))
        summary = Summary(history, evaluated_on, results, samples, times, None, counts)
        if output is not None:
            summary = run.stage(SAVING, lambda: self._save(summary, run, Path(output))) or summary
        return dataclasses.replace(summary, losses=tuple(run.losses))

    def _compile(self, source: DataSource, run: ShrinkableRun) -> None:
        enough_to_evaluate(source, self.world.size)
        check_fits(self.model, source)
        if self._optimizer is None:
            check_compiled(self.model, source)
            run.check()
            return
        chosen = objective(self.model, source) if self._loss is None or self._metrics is None else None
        loss = chosen.loss if chosen is not None and self._loss is None else self._loss
        metrics = chosen.metrics if chosen is not None and self._metrics is None else self._metrics
        self.model.compile(optimizer=self._optimizer, loss=loss, metrics=metrics)
        if self._checkpoints is not None and self._loss is None:
            check_best(self._checkpoints.best, metrics or (), source)
        run.check()

    def _checkpoint(self, source: DataSource, options: CheckpointOptions) -> Checkpoint:
        """Collective: what writes checkpoints, and knows where this run begins."""
        dealt = self._dealt(source)
        made = Checkpoint(**vars(options), callbacks=self._callbacks, world=self.world, dealt=dealt)
        if made.differences and (made.finished or made.position.epoch >= self._epochs):
            raise AgreedError(
                f"the run in {options.directory} is over, so nothing would be trained with others than then "
                f"({'; '.join(made.differences)}): give another --checkpoint-dir, --resume never, or more --epochs"
            )
        return made

    def _dealt(self, source: DataSource) -> Dealt | None:
        if source.epochs is None:
            return None
        return Dealt(source.train_count, self._batch_size * self.world.size, source.epochs.seed)

    def _train(
        self, run: ShrinkableRun, parallel: DataParallel, checkpoint: Checkpoint | None, begin: Position
    ) -> tuple[dict[str, list[float]], Times]:
        world, source = self.world, run.source
        strategy = strategy_of(world)
        display = self._display(source) if world.is_root else None
        report = Report(strategy, display, self._batch_size, _cardinality(source.train), source.train_count)
        # The first makes the numbers those of all ranks, which the others then see.
        callbacks = [parallel, report, *self._callbacks, keras.callbacks.LambdaCallback(on_epoch_begin=run.count)]
        callbacks += [JitChoice(world)] if self._jit == "auto" else []
        callbacks += [] if checkpoint is None else [checkpoint]
        steps = -(-_cardinality(source.train) // self._batch_size)
        every = RunCallbacks(callbacks, self.model, self._epochs, steps, world.activity, begin)
        # A copy at each step, which nobody else needs.
        every.keeps_metrics = run.is_asked_for
        run.every, run.on_shrink = every, self._on_shrink(run, parallel, checkpoint, report)
        exchanging, waiting = strategy.statistics.exchange, world.agreement.waiting_seconds
        began = time.perf_counter()
        try:
            run.begin(begin)
            with locate_damaged_sample(
                source, lambda: every.position(self._batch_size * world.size, source.train_count)
            ):
                history = run.stage(TRAINING, lambda: self._fit(run, every, parallel, checkpoint))
        finally:
            report.close()
            if checkpoint is not None:
                checkpoint.close()
        own = (
            time.perf_counter() - began,
            strategy.statistics.exchange - exchanging,
            world.agreement.waiting_seconds - waiting,
        )
        return history, run.stage(TIMES, lambda: _mean_times(own, world))

    def _fit(
        self, run: ShrinkableRun, every: RunCallbacks, parallel: DataParallel, checkpoint: Checkpoint | None
    ) -> dict[str, list[float]]:
        """Collective: train from where the run is to the last epoch; the numbers of all epochs."""
        source, position, epochs = run.source, every.begun, self._epochs
        is_over = checkpoint is not None and checkpoint.finished
        if is_over or (run.losses and self.model.stop_training and not position.samples):
            epochs = position.epoch
        arguments = {
            "validation_data": self._batches(source.validation),
            "callbacks": every,
            "shuffle": False,  # the source does
            "verbose": 0,
        }
        first = position.epoch
        if position.samples and source.rest is not None:
            first += 1
            rest = self._batches(run.rest(position))
            if source.train_count - position.samples < self.world.size:
                parallel.begin_without_data(rest)
            with every.rest_of_epoch(position.step), warnings.catch_warnings():
                # Nothing may be left of it but its end.
                warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
                self.model.fit(rest, initial_epoch=position.epoch, epochs=first, **arguments)
            if self.model.stop_training:
                epochs = first
        train = self._batches(source.train)
        found = self.model.fit(train, initial_epoch=first, epochs=max(first, epochs), **arguments).history
        return {name: [float(value) for value in values] for name, values in found.items()}

    def _on_shrink(
        self, run: ShrinkableRun, parallel: DataParallel, checkpoint: Checkpoint | None, report: Report
    ) -> Callable[[Position, bool], None]:
        """Local: what all that takes part in the training is told when ranks were lost."""
        leads = self.world.is_root

        def on_shrink(position: Position, training: bool) -> None:
            nonlocal leads
            source, leads_now = run.source, self.world.is_root and not leads
            leads |= leads_now
            parallel.go_on(training)
            report.on_shrink(_cardinality(source.train), self._display(source) if leads_now else None)
            if checkpoint is not None:
                history = {} if run.every is None else run.every.noted[0]
                checkpoint.go_on(position, self._dealt(source), history, leads_now)

        return on_shrink

    def _display(self, source: DataSource) -> ProgressDisplay | None:
        if not self._progress:
            return None
        unit = "images" if len(source.input_shape) == 3 else "samples"
        # Python's own stream: other ranks than 0 may have put theirs away.
        file = sys.stdout if self.world.numbers[0] == 0 else sys.__stdout__
        return ProgressDisplay(self._epochs, source.train_count, unit=unit, columns=self._columns(), file=file)

    def _columns(self) -> int | None:
        """Width of the user's terminal; 0 for none, None where no launcher stands between."""
        if launcher.detect(os.environ) is None:
            return None
        terminal = launchers_terminal()
        return 0 if terminal is None else terminal.columns

    def _evaluate(
        self, source: DataSource, parallel: DataParallel, history: dict[str, list[float]]
    ) -> tuple[dict[str, float], str]:
        if source.test is not None:
            found = self.model.evaluate(self._batches(source.test), callbacks=[parallel], return_dict=True, verbose=0)
            return {name: float(value) for name, value in found.items()}, "test"
        prefix, part = ("val_", "validation") if source.validation is not None else ("", "training")
        last = {name: values[-1] for name, values in history.items() if name != "learning_rate"}
        return {name.removeprefix(prefix): last[name] for name in last if name.startswith(prefix)}, part

    def _save(self, summary: Summary, run: ShrinkableRun, directory: Path) -> Summary:
        """Collective: rank 0 saves; all ranks know whether it could."""
        path = directory / MODEL_NAME
        summary = dataclasses.replace(summary, losses=tuple(run.losses))
        numbers = dataclasses.asdict(summary) | {"model_path": str(path), "ranks": self.world.size}
        numbers |= run.source.as_info()

        def save() -> None:
            if run.losses:  # rank 0 may be another one, on another host
                prepare_directory(directory)
            save_model(self.model, directory)
            save_summary(numbers, directory)

        run_on_root(self.world.communicator, save)
        return dataclasses.replace(summary, model_path=path)

    def _batches(self, dataset: Any) -> Any:
        return None if dataset is None else without_autotuning(dataset.batch(self._batch_size).prefetch(2))


def enough_to_evaluate(source: DataSource, ranks: int) -> None:
    """Local: every rank has samples to evaluate, where there are any.

    Raises:
        DataError: there are fewer than ranks.
    """
    for part, count in (("validation", source.validation_count), ("test", source.test_count)):
        if 0 < count < ranks:
            raise DataError(
                f"{source.description}: {counted(count, f'{part} sample')}, too few for {ranks} ranks: give at "
                "least one for each rank, or none (as with --validation-split 0)"
            )


def _mean_times(own: tuple[float, float, float], world: World) -> Times:
    """Collective: of the times of all ranks."""
    everyone = world.communicator.all_gather_obj(own)
    return Times(*(sum(column) / len(everyone) for column in zip(*everyone, strict=True)))


def _cardinality(dataset: Any) -> int:
    return max(0, int(dataset.cardinality().numpy()))


def scaled_learning_rate(rate: float, scaling: str, ranks: int) -> float:
    """Local: the learning rate for `ranks` times the batch: `none`, `linear` (Goyal et al. 2017) or `sqrt`."""
    factors: dict[str, float] = {"none": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}
    return rate * factors[scaling]


def cosine_decay(rate: float, epochs: int) -> Any:
    """Local: a callback that lowers the learning rate with each epoch, from `rate` to nearly 0 (Loshchilov 2017)."""
    return keras.callbacks.LearningRateScheduler(lambda epoch: rate * (1 + math.cos(math.pi * epoch / epochs)) / 2)


def make_optimizer(name: str, learning_rate: float | None, scaling: str, ranks: int) -> Any:
    """Local: a Keras optimizer with the scaled rate; `learning_rate` None takes the optimizer's own."""
    config = {} if learning_rate is None else {"learning_rate": learning_rate}
    optimizer = keras.optimizers.get({"class_name": name, "config": config})
    optimizer.learning_rate = scaled_learning_rate(float(optimizer.learning_rate.numpy()), scaling, ranks)
    return optimizer
