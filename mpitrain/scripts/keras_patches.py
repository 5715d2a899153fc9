"""What is changed in Keras while a script runs that knows nothing of ranks.

Every rank runs the whole script. Where it trains, evaluates or writes files through Keras, each rank does
its part, and all see the same numbers; everything else they do alike. So all ranks take the same decisions,
and reach the same collectives in the same order.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from mpitrain.data.portions import Portion
from mpitrain.runtime import keras_private
from mpitrain.runtime.keras_private import patch
from mpitrain.scripts.batch_callbacks import STOP, looks_at, synchronize_callbacks
from mpitrain.scripts.data_comparison import ComparisonCallback, DataComparison
from mpitrain.scripts.division import DataDivision
from mpitrain.scripts.file_names import Names, paths_of
from mpitrain.scripts.loops import OWN, DividedLoops
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.strategies.parameter_server.server_parts import is_of_server
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.counting import weigh_scalars
from mpitrain.training.model_hook import test_on_whole_batch, train_on_rows
from mpitrain.training.model_state import average_batch_statistics
from mpitrain.training.optimizer import DistributedOptimizer, hook_of
from mpitrain.world.world import World

Arguments = dict[str, Any]
Note = Callable[[str, str], None]


class DryRunEnded(BaseException):
    """The script has come to its first training call, and only wanted to know what would happen there."""


class KerasPatches:
    """Makes the Keras of this process data-parallel.

    Args:
        division: how data is divided, and whether the script ends where it would train.
        note: told what is changed, as (part, text).

    Attributes:
        trained: the script has trained something.
        evaluated: the script has evaluated something.
    """

    def __init__(self, world: World, division: WorkDivision, note: Note, names: Names) -> None:
        self.trained = self.evaluated = False
        portion = Portion(world.rank, world.size, division.batch_is_global)
        self._world, self._portion, self._table, self._names = world, portion, note, names
        self._dry_run, self._comparison = division.dry_run, DataComparison(world, note)
        self._loss_is, self._sync_batch_norm = division.loss_is, division.sync_batch_norm
        self._loops: DividedLoops | None = None
        if division.divide_loops:
            self._loops = DividedLoops(
                world,
                portion,
                self._note,
                lambda: self.training,
                self._comparison,
                self._loss_is,
                self._sync_batch_norm,
            )
        self._division = DataDivision(portion, self._note)
        self._how: dict[str, str] = {}  # the data of each call are divided
        self._fits = 0  # under way
        self._applying = 0

    def install(self) -> None:
        """Local: patch Keras. The classes stay themselves: subclasses and saved models are what they were."""
        patch(keras.Model, "fit", self._fit)
        patch(keras.Model, "evaluate", self._evaluate)
        patch(keras.Model, "predict", self._predict)
        patch(keras.Model, "train_on_batch", self._train_on_batch)
        patch(keras.Model, "test_on_batch", self._test_on_batch)
        patch(keras.Model, "predict_on_batch", self._on_whole_batch)
        patch(keras.optimizers.Optimizer, "apply", self._apply)
        patch(keras.optimizers.LossScaleOptimizer, "apply", self._apply)
        weigh_scalars()
        if self._loops is not None:
            self._loops.install()

    @property
    def training(self) -> bool:
        """True inside a `fit`, where ranks may stand at different batches."""
        return self._fits > 0

    def _fit(self, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as `Model.fit`, on this rank's portion."""
        arguments = _bound(fit, model, args, kwargs)
        if _knows_ranks(arguments.get("callbacks")) or not model.compiled:  # the latter Keras refuses
            self.trained = True
            return fit(model, **arguments)
        # Before they are divided: afterwards they differ rightly.
        self._comparison.check("fit", arguments)
        self._watch(arguments)
        self._division.divide_training(model, arguments)
        self._note_model(model)
        arguments["callbacks"] = self._with_data_parallel(arguments.get("callbacks"), model, training=True)
        self._begin_training("fit")
        self._silence(arguments)
        # Ranks have different numbers of batches: within this nobody waits for the others at a file, or at anything
        # else that only a callback comes to.
        with self._fitting(), self._leaving_loops():
            history = fit(model, **arguments)
        # From here on all ranks stand at the same place of the script again.
        self._world.agreement.call("end of fit")
        return history

    def _evaluate(self, evaluate: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as `Model.evaluate`, on this rank's portion; the numbers are those of all."""
        if keras_private.CALLED_BY_FIT in kwargs:  # by `fit`, which has divided the data
            return evaluate(model, *args, **kwargs)
        arguments = _bound(evaluate, model, args, kwargs)
        self.evaluated = True
        if _knows_ranks(arguments.get("callbacks")) or not model.compiled:
            return evaluate(model, **arguments)
        self._comparison.check("evaluate", arguments)
        arguments["x"] = self._comparison.watch("evaluate", arguments["x"])
        self._division.divide_evaluation(model, arguments)
        arguments["callbacks"] = self._with_data_parallel(arguments.get("callbacks"), model)
        self._silence(arguments)
        with self._leaving_loops():
            result = evaluate(model, **arguments)
        self._comparison.settle("evaluate")
        return result

    def _predict(self, predict: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as `Model.predict`: each rank predicts all, for the script goes on with the result."""
        self._note("data", "predict: every rank predicts all samples")
        if not self.training:
            average_batch_statistics(model, self._world)
        arguments = _bound(predict, model, args, kwargs)
        self._silence(arguments)
        return predict(model, **arguments)

    def _on_whole_batch(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as `Model.predict_on_batch`: each rank computes the whole batch."""
        if not self.training:
            average_batch_statistics(model, self._world)
        return method(model, *args, **kwargs)

    def _test_on_batch(self, test: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as `Model.test_on_batch`, likewise."""
        if keras_private.FORGETS_BEFORE_BATCHES or self.training or not model.compiled:
            return self._on_whole_batch(test, model, *args, **kwargs)
        average_batch_statistics(model, self._world)
        return test_on_whole_batch(model, test, _bound(test, model, args, kwargs), self._world)

    def _train_on_batch(self, train: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as `Model.train_on_batch`, on this rank's rows of the batch."""
        if not model.compiled:  # which Keras refuses
            return train(model, *args, **kwargs)
        self._note_model(model)
        self._note("data", "train_on_batch: each batch is divided by rows")
        self._begin_training("train_on_batch")
        arguments = _bound(train, model, args, kwargs)
        self._comparison.check_often("train_on_batch", arguments)
        loss_is = self._loss_is if self._division.divide_batch(model, arguments) else None
        return train_on_rows(model, train, arguments, self._world, loss_is, self._sync_batch_norm)

    def _apply(self, apply: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: an optimizer of the script that is used for the first time becomes a distributed one."""
        if is_of_server(optimizer):
            return apply(optimizer, *args, **kwargs)
        if self._applying or hook_of(optimizer) is not None:
            # Of an optimizer inside another one the outer has taken the mean.
            self._applying += 1
            try:
                return apply(optimizer, *args, **kwargs)
            finally:
                self._applying -= 1
        self._note("optimizer", f"{type(optimizer).__name__}: gradients are averaged over all ranks")
        if self._loops is None:
            self._note("data", f"{OWN}: every rank computes whole batches, as the script reads them")
        self._begin_training(OWN)
        return DistributedOptimizer(optimizer, world=self._world).apply(*args, **kwargs)

    def _with_data_parallel(self, callbacks: Any, model: Any, training: bool = False) -> Any:
        """Local: the callbacks, behind the one that makes the rest of Keras data-parallel."""
        made = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        given = [] if made is None else keras.tree.flatten(made)
        for callback in given:
            self._note("callbacks", f"{type(callback).__name__}: sees the numbers of all ranks{_when(callback, model)}")
        own = [ComparisonCallback(self._comparison, self._world)] if training else []
        if training and self._names.compare(paths_of(given)):
            self._note("files", "ranks name files of callbacks differently; the first rank of each name writes it")
        parallel = DataParallel(world=self._world, loss_is=self._loss_is, sync_batch_norm=self._sync_batch_norm)
        every = [parallel, *own, *synchronize_callbacks(self._world, given)]
        if made is callbacks:
            return every
        # Keras has told the callbacks of a CallbackList of the model; the script may give the same list again.
        mine = copy.copy(callbacks)
        mine.callbacks = every
        keras_private.call_at_once(mine)
        for callback in every:
            if callback not in given:
                callback.set_model(model)
        return mine

    def _silence(self, arguments: Arguments) -> None:
        if not self._world.is_root:
            arguments["verbose"] = 0

    def _note_model(self, model: Any) -> None:
        self._note("model", f"{model.name}: starts from rank 0's weights, checked to be the same on all ranks")
        if model.optimizer is not None:
            kind = type(model.optimizer).__name__
            self._note("optimizer", f"{kind}: gradients are averaged over all ranks, weighted by samples")

    def _note(self, part: str, text: str) -> None:
        self._table(part, text)
        if part == "data":
            self._how.setdefault(text.partition(":")[0], text)

    def _begin_training(self, call: str) -> None:
        if self._dry_run:
            self.trained = True
            raise DryRunEnded
        if self._world.is_root and not self.trained:
            sys.stderr.write(f"mpitrain: {self._world.size} ranks train together; {self._how.get(call, call)}\n")
        self.trained = True

    def _watch(self, arguments: Arguments) -> None:
        """Local: the first batches of what is trained and validated on are compared when they are read."""
        arguments["x"] = self._comparison.watch("fit", arguments.get("x"))
        validation = arguments.get("validation_data")
        if validation is not None and not isinstance(validation, tuple | list):
            arguments["validation_data"] = self._comparison.watch("validation_data", validation)

    @contextmanager
    def _leaving_loops(self) -> Iterator[None]:
        """Local: a loop that an exception ended is under way no more."""
        loops = strategy_of(self._world).joining.takes_part
        depth = len(loops)
        try:
            yield
        finally:
            del loops[depth:]

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        self._fits += 1
        try:
            yield
        finally:
            self._fits -= 1


def _when(callback: Any, model: Any) -> str:
    """Local: at what times a callback sees the numbers of all ranks."""
    if not any(looks_at(callback, kind) for kind in STOP):
        return " at the end of epochs"
    if model.steps_per_execution > 1:
        return " at the end of epochs, its own at batches, for steps_per_execution is above 1"
    return " at batches too, and is called at the same batches"


def _bound(function: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Local: arguments by name, without the model."""
    bound = inspect.signature(function).bind(model, *args, **kwargs).arguments
    return dict(list(bound.items())[1:])


def _knows_ranks(callbacks: Any) -> bool:
    given = getattr(callbacks, "callbacks", callbacks) or []
    return any(isinstance(one, DataParallel) for one in (given if isinstance(given, list | tuple) else [given]))
