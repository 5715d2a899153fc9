"""A run that is stopped and goes on is the run that was not stopped, on ranks that are threads."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from mpitrain.checkpoint import files
from mpitrain.checkpoint.callback import Checkpoint
from mpitrain.checkpoint.options import Position
from mpitrain.checkpoint.stop import StoppedBySignal
from mpitrain.errors import AgreedError
from mpitrain.training.callbacks import DataParallel
from mpitrain.world.world import World
from tests.problem import batches, dataset, mlp
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()
STEPS, EPOCHS = 3, 2


class Stopping(keras.callbacks.Callback):
    """Does something after the step of that number, counted over all epochs, on one rank or all."""

    def __init__(self, after: int, action: Any) -> None:
        super().__init__()
        self.left, self.action = after, action

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()


def model(optimizer: Any = None) -> Any:
    with ONE_AT_A_TIME:
        return mlp(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True)


def fit(world: World, directory: Path, before: Any = (), own: Any = None, **options: Any) -> Any:
    """The model and its history; `before` stands before the checkpoint in the list of callbacks."""
    own = own or model()
    checkpoint = Checkpoint(directory, world=world, **options)
    pairs = batches(world.rank, [4] * STEPS)
    callbacks = [DataParallel(world=world), *before, checkpoint]
    begin = checkpoint.position.epoch
    history = own.fit(dataset(pairs), verbose=0, epochs=EPOCHS, initial_epoch=begin, callbacks=callbacks).history
    return [one.numpy() for one in [*own.weights, *own.optimizer.variables]], history, checkpoint.position


def kept(directory: Path) -> list[Position]:
    """Where the checkpoints that there are go on, in their order."""
    found = sorted(path for path in directory.iterdir() if path.is_dir())
    return [Position(**files.read(path).info["position"]) for path in found]


def check_same(found: Any, expected: Any) -> None:
    for mine, truth in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, truth)


def check_history(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Of all epochs, also those before."""
    assert sorted(found) == sorted(expected)
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-12, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a run that was not stopped."""
    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        if dtype == "float64":
            found = run(2, lambda world: fit(world, tmp_path_factory.getbasetemp() / "whole", every="epoch"))
    return found


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every": "epoch"}, [3, 6]),
        ({"every": "epoch", "keep": 1}, [6]),
        ({"every": "1h"}, [3, 6]),
    ],
    ids=str,
)
def test_when_checkpoints_are_written(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    """So often, at the end, and where an epoch is the best so far, as these are."""
    run(2, lambda world: fit(world, tmp_path, best="loss", **options))
    assert [position.steps for position in kept(tmp_path)] == steps


@pytest.mark.parametrize(
    ("number", "code", "after"), [(signal.SIGTERM, 85, 1), (signal.SIGTERM, 85, 2), (signal.SIGINT, 130, 4)]
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on(
    whole: Any, tmp_path: Path, number: signal.Signals, code: int, after: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(world: World) -> Any:
        checkpoint, own = Checkpoint(tmp_path, world=world, every="1h"), model()
        tell = [Stopping(after, lambda: checkpoint._leaving._request(number))] if world.rank else []
        callbacks = [DataParallel(world=world), *tell, checkpoint]
        with pytest.raises(StoppedBySignal) as caught:
            own.fit(dataset(batches(world.rank, [4] * STEPS)), verbose=0, epochs=EPOCHS, callbacks=callbacks)
        return caught.value.code, fit(world, tmp_path)

    epoch, step = after // STEPS, after % STEPS + 1  # after the third, nothing is left of an epoch
    for (found, (mine, history, begin)), (truth, expected, _) in zip(run(2, rank), whole, strict=True):
        assert found == code
        assert begin == Position(epoch, step, 0, after + 1), "with the header of the next step all know"
        check_same(mine, truth)
        check_history(history, expected)
    told = f"{number.name} came to rank 1 (host); all ranks have stopped at epoch {epoch + 1}, after {step} steps of it"
    assert told in capfd.readouterr().err


def test_a_run_that_is_over_is_not_made_again(whole: Any, tmp_path: Path) -> None:
    def rank(world: World) -> Any:
        fit(world, tmp_path)
        return fit(world, tmp_path)

    for (mine, history, begin), (truth, expected, _) in zip(run(2, rank), whole, strict=True):
        assert begin == Position(2, 0, 0, 6)
        check_history(history, expected)
        check_same(mine, truth)


@pytest.mark.parametrize(
    ("options", "compiled", "message"),
    [
        ({"best": "accurracy"}, True, "--checkpoint-best accurracy: there is no such number, only accuracy, loss"),
        ({}, False, "must stand behind DataParallel"),
    ],
)
def test_what_all_ranks_refuse(tmp_path: Path, options: Any, compiled: bool, message: str) -> None:
    def rank(world: World) -> None:
        checkpoint, own = Checkpoint(tmp_path, world=world, **options), model()
        callbacks = [DataParallel(world=world), checkpoint] if compiled else [checkpoint]
        with pytest.raises(AgreedError, match=message):
            own.fit(dataset(batches(world.rank, [4])), verbose=0, callbacks=callbacks)

    run(2, rank)


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        fit(world, tmp_path)
        with pytest.raises(AgreedError, match="where this run has adam/"):
            fit(world, tmp_path, own=model(keras.optimizers.Adam(0.1)))

    run(2, rank)
