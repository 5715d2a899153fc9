"""Callbacks that look at single batches see the same numbers, and decide alike, on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest

from mpitrain.scripts.batch_callbacks import looks_at, synchronize_callbacks
from mpitrain.training.callbacks import DataParallel
from mpitrain.world.world import World
from tests.problem import batches, dataset, merged, mlp
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()
SIZES = [[4, 4, 2], [2]]  # the second rank runs out of data


def model() -> Any:
    with ONE_AT_A_TIME:
        return mlp(keras.optimizers.SGD(0.1), run_eagerly=True)


class Look(keras.callbacks.Callback):
    """Notes what it sees, halves the learning rate after a batch, and stops at another."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.last = last

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("begins", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("ends", batch, logs["loss"], logs["accuracy"]))
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.5)
        self.model.stop_training = batch == self.last


@pytest.mark.parametrize("last", [9, 1], ids=["all batches", "stopped"])
def test_they_see_what_they_see_in_one_process(last: int) -> None:
    everyone = [batches(rank, sizes) for rank, sizes in enumerate(SIZES)]

    def trained(pairs: Any, callbacks: list[Any]) -> Any:
        own, look = model(), Look(last)
        own.fit(dataset(pairs), verbose=0, epochs=2, callbacks=[*callbacks[:1], *callbacks[1:], look])
        return look.seen, float(own.optimizer.learning_rate.numpy()), own

    def rank(world: World) -> Any:
        look = Look(last)
        own = model()
        callbacks = [DataParallel(world=world), *synchronize_callbacks(world, [look])]
        own.fit(dataset(everyone[world.rank]), verbose=0, epochs=2, callbacks=callbacks)
        return look.seen, float(own.optimizer.learning_rate.numpy())

    seen, rate, _ = trained(merged(everyone), [])
    for mine, own_rate in run(2, rank):
        assert own_rate == rate
        assert [one[:2] for one in mine] == [one[:2] for one in seen]
        for one, other in zip(mine, seen, strict=True):
            assert one[2:] == pytest.approx(other[2:], rel=1e-6)  # Keras before 3.14 keeps metrics in float32


@pytest.mark.parametrize(
    ("callback", "train", "test"),
    [
        (keras.callbacks.Callback(), False, False),
        (keras.callbacks.History(), False, False),
        (keras.callbacks.ProgbarLogger(), False, False),
        (keras.callbacks.ModelCheckpoint("x.keras"), False, False),
        (keras.callbacks.ModelCheckpoint("x.keras", save_freq=3), True, False),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True, False),
        (keras.callbacks.TerminateOnNaN(), True, True),
        (Look(0), True, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_look_at_batches(callback: Any, train: bool, test: bool) -> None:
    if isinstance(callback, keras.callbacks.LambdaCallback):
        assert looks_at(callback, "train")
        return
    assert (looks_at(callback, "train"), looks_at(callback, "test")) == (train, test)


def test_without_such_callbacks_nothing_is_added() -> None:
    plain = [keras.callbacks.History()]
    assert run(2, lambda world: len(synchronize_callbacks(world, plain))) == [1, 1]
    assert run(1, lambda world: len(synchronize_callbacks(world, [Look(0)]))) == [1]
