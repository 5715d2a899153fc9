"""What is shown of a run are the numbers of all ranks, over their samples."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

from mpitrain.strategies.strategy import strategy_of
from mpitrain.trainer.reporting import Report, _place, _shown
from mpitrain.training.callbacks import DataParallel
from mpitrain.world.world import World
from tests.problem import batches, dataset, mlp
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()
SIZES = [[4, 4, 1], [4, 2]]  # of each rank; one runs out of data


class Shown:
    """A display that notes what it is to show."""

    def __init__(self, is_bar: bool) -> None:
        self.is_bar = is_bar
        self.epochs: list[Any] = []
        self.updates: list[Any] = []
        self.closed = 0

    def begin_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def update(self, samples: float, numbers: Any) -> None:
        self.updates.append((samples, dict(numbers)))

    def end_epoch(self, samples: float, numbers: Any) -> None:
        self.epochs.append((samples, list(numbers)))

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("is_bar", [True, False])
def test_rank_0_shows_the_numbers_of_all_ranks(is_bar: bool) -> None:
    def rank(world: World) -> Any:
        with ONE_AT_A_TIME:
            model = mlp(keras.optimizers.SGD(0.1), run_eagerly=True)
        display: Any = Shown(is_bar) if world.is_root else None
        own: list[Any] = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                own.append([float(logs["loss"]), float(logs["accuracy"]), float(sum(SIZES[world.rank][: batch + 1]))])

        report = Report(strategy_of(world), display, 4, sum(SIZES[world.rank]), 15)
        pairs = batches(world.rank, SIZES[world.rank])
        callbacks = [DataParallel(world=world), Look(), report]
        model.fit(dataset(pairs), validation_data=pairs[0], verbose=0, epochs=2, callbacks=callbacks)
        report.close()
        return display, own

    (shown, mine), (_, theirs) = run(2, rank)
    assert shown.epochs == [epoch for number in range(2) for epoch in (number, (15, NAMES))]
    assert shown.closed == 1
    if not is_bar:
        assert shown.updates == []
        return
    assert [samples for samples, _ in shown.updates] == [8.0, 14.0, 15.0] * 2
    for epoch in range(2):
        first, second, third = (numbers for _, numbers in shown.updates[3 * epoch : 3 * epoch + 3])
        own, other = mine[3 * epoch : 3 * epoch + 3], theirs[2 * epoch : 2 * epoch + 2]
        assert list(first.values()) == own[0][:2], "no header has told of this epoch yet"
        # What a rank has reached comes with the header of its next step.
        for found, (one, two) in ((second, (own[0], other[0])), (third, (own[1], other[1]))):
            truth = np.average([one[:2], two[:2]], axis=0, weights=[one[2], two[2]])
            np.testing.assert_allclose([found["loss"], found["accuracy"]], truth, rtol=1e-12)


NAMES = ["loss", "accuracy", "val_loss", "val_accuracy"]


@pytest.mark.parametrize(
    ("logs", "shown"),
    [
        (["loss", "accuracy", "mae"], ["loss", "accuracy"]),
        (["mae", "loss", "val_loss"], ["loss", "mae"]),
        (["loss", "val_mae"], ["loss"]),
        (["mae"], ["mae"]),
        ([], []),
    ],
)
def test_loss_and_the_first_metric_are_shown(logs: list[str], shown: list[str]) -> None:
    assert _shown(dict.fromkeys(logs, 0.0)) == shown


def test_the_loss_stands_first() -> None:
    assert sorted(["val_b", "val_loss", "a", "b", "loss"], key=_place) == ["loss", "a", "b", "val_loss", "val_b"]


def test_who_shows_after_a_loss() -> None:
    def rank(world: World) -> None:
        first, second = Shown(True), Shown(True)
        report = Report(strategy_of(world), None, 4, 8, 8)
        report.on_shrink(16, None)
        report.close()
        report.on_shrink(16, first)  # type: ignore[arg-type]
        report.on_shrink(16, second)  # type: ignore[arg-type]
        report.on_train_begin()
        report.on_train_batch_end(2, {"loss": 1.0})
        assert world.agreement.report == (1.0, 0.0, 12.0), "of the samples that it has now"
        report.close()
        assert (first.closed, second.closed) == (1, 0)
        report.on_epoch_end(0, {"loss": 1.0, "learning_rate": 0.1, "table": np.zeros(2)})
        assert first.epochs == [(8, ["loss"])]

    run(1, rank)
