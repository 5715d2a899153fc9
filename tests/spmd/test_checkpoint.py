"""A run that is stopped and resumed ends as one that was not, with as many ranks to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.callbacks import Checkpoint, DataParallel
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.local import LocalCommunicator
from mpitrain.data.arrays import array_samples
from mpitrain.data.source import DataSource, Share, assemble
from mpitrain.errors import AgreedError
from mpitrain.runtime.topology import Topology
from mpitrain.trainer.trainer import Trainer
from mpitrain.world.agreement import Agreement
from mpitrain.world.policy import by_size
from mpitrain.world.world import World
from tests.spmd.truth import WORLD

pytestmark = pytest.mark.ranks(2)
SAMPLES, EPOCHS, GRACE_SECONDS = 41, 3, 3600.0


class Missed(keras.metrics.Metric):
    """How far this epoch is from having seen each sample exactly once: 0 if it has. Labels are sample numbers."""

    def __init__(self) -> None:
        super().__init__(name="missed")
        self.seen = self.add_weight(shape=(SAMPLES,), initializer="zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        numbers = tf.cast(tf.reshape(y_true, [-1]), tf.int64)
        self.seen.assign_add(tf.math.bincount(numbers, minlength=SAMPLES, dtype=tf.float32))

    def result(self) -> Any:
        return tf.reduce_sum(tf.abs(self.seen - 1.0))


def source(world: World) -> DataSource:
    random = np.random.default_rng(1)
    x = random.normal(size=(SAMPLES, 6)).astype(np.float32)
    y = np.arange(SAMPLES, dtype=np.float32)
    share = Share(0.0, 11, world.rank, world.size)
    return assemble(array_samples(x, y), share, num_classes=None, description="numbered samples")


def plain(units: int = 8) -> Any:
    keras.utils.set_random_seed(4)
    hidden, out = keras.layers.Dense(units, "tanh", name="hidden"), keras.layers.Dense(1, name="out")
    return keras.Sequential([keras.Input((6,)), hidden, out], name="plain")


def with_own_state() -> Any:
    """Moments and random streams are each rank's own in the middle of an epoch."""
    keras.utils.set_random_seed(4)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )


class Signals(keras.callbacks.Callback):
    """Sends a signal to one rank, which is as far as an epoch and a batch of it, and goes on when it was noticed."""

    def __init__(
        self, rank: int, epoch: int, batch: int, number: int = signal.SIGUSR1, *, world: World = WORLD
    ) -> None:
        super().__init__()
        self.due, self.number, self.epoch, self.world = (rank, epoch, batch), number, 0, world

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.due[1:] == (self.epoch, batch) and self.due[0] == WORLD.rank:
            os.kill(os.getpid(), self.number)
            deadline = time.monotonic() + 60
            while self.world.agreement.request >> 1 != self.number and time.monotonic() < deadline:
                time.sleep(0.001)


class PowerCut(keras.callbacks.Callback):
    """Ends the run in the last step of the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for thread in threading.enumerate():
            if thread.name == "mpitrain checkpoint":
                thread.join()
        if (batch, len(self.model.history.epoch)) == (5, 1):
            raise RuntimeError("power cut")


class Run:
    """One training job, begun again and again."""

    def __init__(self, model: Callable[[], Any], optimizer: Callable[[], Any], directory: Path) -> None:
        self.make_model, self.make_optimizer, self.directory = model, optimizer, directory

    def __call__(
        self, *callbacks: Any, save: bool = True, world: World = WORLD, batch: int = 4, **options: Any
    ) -> tuple[Any, dict[str, list[float]]]:
        keras.utils.clear_session()  # in some tests rank 0 makes more models than the others, here of the same names
        model = self.make_model()
        options = {"every": "3steps", "grace_seconds": GRACE_SECONDS, **options}
        trainer = Trainer(
            model,
            optimizer=self.make_optimizer(),
            metrics=[Missed()],
            batch_size=batch,
            epochs=EPOCHS,
            callbacks=callbacks,
            checkpoints=CheckpointOptions(self.directory, **options) if save else None,
            progress=False,
            world=world,
        )
        return model, trainer.fit(source(world)).history

    def stopped(self, *arguments: Any, **options: Any) -> int:
        """The exit code with which a signal ends it."""
        with pytest.raises(SystemExit) as left:
            self(Signals(*arguments, world=options.get("world", WORLD)), **options)
        return int(left.value.code or 0)


def alone() -> World:
    """A job of this rank only."""
    host, communicator = WORLD.topology.host, LocalCommunicator()
    agreement = Agreement(communicator, [host])
    all_reduce = AllReduce(communicator, "alone", {})
    place = Topology.single(host)
    return World(place, communicator, agreement, all_reduce, WORLD.devices, WORLD.threads, make_strategy=by_size)


def numbers(model: Any) -> list[bytes]:
    return [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]


def newest(directory: Path) -> tuple[Path, dict[str, Any]]:
    path = max(directory.glob("checkpoint-*"))
    return path, json.loads((path / "manifest.json").read_text())["info"]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=1024.0, dynamic_growth_steps=4
    ),
    "accumulation, averaged": lambda: keras.optimizers.SGD(
        0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=None
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stopped_in_mid_epoch_and_resumed(shared_path: Path, name: str) -> None:
    run = Run(with_own_state, OPTIMIZERS[name], shared_path / "checkpoints")
    undisturbed, history = run(save=False)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert run.stopped(WORLD.size - 1, 1, 1) == 85
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    _, info = newest(run.directory)
    assert (info["position"]["epoch"], info["ranks"]) == (1, WORLD.size)
    assert 2 <= info["position"]["step"] <= 4, info["position"]
    assert run.stopped(0, 2, 3, signal.SIGINT) == 130
    resumed, history_of_all = run()
    assert numbers(resumed) == numbers(undisturbed)
    assert history_of_all == history
    assert history["missed"] == [0.0] * EPOCHS
    loaded = keras.models.load_model(max(run.directory.glob("checkpoint-*")) / "model.keras", compile=False)
    if name != "accumulation, averaged":  # the end of `fit` puts the averages into the weights
        assert [v.numpy().tobytes() for v in loaded.weights] == [v.numpy().tobytes() for v in resumed.weights]
    mpitrain.barrier()
    if WORLD.is_root:
        assert not list(run.directory.glob(".part-*"))
    finished, again = run()
    assert numbers(finished) == numbers(undisturbed)
    assert again == history


@pytest.mark.skipif(WORLD.size == 1, reason="one rank is one rank")
def test_another_number_of_ranks_goes_on_with_the_same_order(shared_path: Path) -> None:
    run = Run(plain, lambda: keras.optimizers.SGD(0.01), shared_path / "two")
    _, expected = run(save=False)
    assert run.stopped(1, 1, 1) == 85
    if WORLD.is_root:
        fewer = Run(plain, run.make_optimizer, Path(shutil.copytree(run.directory, shared_path / "two to one")))
        _, history = fewer(world=alone(), batch=4 * WORLD.size)
        assert history["missed"] == [0.0] * EPOCHS
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
        others = Run(plain, run.make_optimizer, Path(shutil.copytree(run.directory, shared_path / "other batches")))
        _, history = others(world=alone(), batch=3)
        assert history["missed"] == [0.0] * EPOCHS
        one = Run(plain, run.make_optimizer, shared_path / "one to two")
        assert one.stopped(0, 1, 2, world=alone(), batch=4 * WORLD.size) == 85
        cut = Run(plain, run.make_optimizer, shared_path / "less than a step")
        with pytest.raises(RuntimeError, match="power cut"):
            cut(PowerCut(), world=alone(), batch=4 * WORLD.size, every="11steps")
        _, info = newest(cut.directory)
        assert info["position"]["samples"] == SAMPLES - 1
    for directory in ("one to two", "less than a step"):
        mpitrain.barrier()
        model, history = Run(plain, run.make_optimizer, shared_path / directory)()
        assert history["missed"] == [0.0] * EPOCHS
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
        mpitrain.verify_replicas(model.trainable_variables)


def test_what_cannot_be_resumed_is_refused_on_all_ranks(shared_path: Path) -> None:
    run = Run(plain, lambda: keras.optimizers.SGD(0.01), shared_path / "checkpoints")
    assert run.stopped(0, 0, 0) == 85
    path, _ = newest(run.directory)
    with pytest.raises(AgreedError, match=r"holds plain/hidden/kernel of shape \(6, 8\) .* where this run has plain"):
        Run(lambda: plain(9), run.make_optimizer, run.directory)()
    with pytest.raises(AgreedError, match="has nothing for adam"):
        Run(plain, lambda: keras.optimizers.Adam(0.01), run.directory)()
    with pytest.raises(AgreedError, match="none cannot be resumed from"):
        run(resume=str(shared_path / "none"))
    mpitrain.barrier()
    _, history = run(resume="never")
    assert history["missed"] == [0.0] * EPOCHS
    _, info = newest(run.directory)
    assert info["position"]["steps"] == EPOCHS * -(-SAMPLES // (4 * WORLD.size))
    assert path.exists() or len(list(run.directory.glob("checkpoint-*"))) >= 3


def test_a_resume_tells_what_differs_and_a_run_that_is_over_takes_no_others(
    shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(plain, lambda: keras.optimizers.SGD(0.01), shared_path / "checkpoints")
    before = {"--data": "a.csv", "--batch-size": 4, "--seed": None}
    assert run.stopped(0, 1, 1, run=before) == 85
    _, history = run(run={**before, "--data": "b.csv", "--seed": 3, "--other": 1})
    assert history["missed"] == [0.0] * EPOCHS
    sys.stderr.flush()
    said = "goes on with others than before: --data b.csv (then a.csv); --seed 3 (then by default)\n"
    assert capfd.readouterr().err.count(said) == int(WORLD.is_root)
    with pytest.raises(
        AgreedError, match=r"is over, .* others than then \(--data c.csv \(then b.csv\)\): give another"
    ):
        run(run={**before, "--data": "c.csv", "--seed": 3})
    _, again = run(run={**before, "--data": "b.csv", "--seed": 3})
    assert again == history
    sys.stderr.flush()
    assert capfd.readouterr().err.count("the run is over, and nothing is left to train") == int(WORLD.is_root)


def test_the_best_of_a_number_that_is_not_there_refused_on_all_ranks(shared_path: Path) -> None:
    run = Run(plain, lambda: keras.optimizers.SGD(0.01), shared_path / "checkpoints")
    with pytest.raises(AgreedError, match="--checkpoint-best f1: there is no such number, only loss, missed: name one"):
        run(best="f1")
    x, y = np.ones((24, 6), "f"), np.ones((24, 1), "f")
    model = plain()
    model.compile("sgd", "mse", metrics=["mae"])
    own = Checkpoint(shared_path / "c", best="f1", grace_seconds=GRACE_SECONDS)
    with pytest.raises(AgreedError, match=r"no such number, only .*mae"):
        model.fit(x, y, epochs=EPOCHS, verbose=0, callbacks=[DataParallel(), own])
    own.close()


def test_a_directory_that_vanishes_does_not_stop_the_training(
    shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Vanishes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0 and WORLD.is_root:
                directory = shared_path / "checkpoints"
                directory.rename(shared_path / "elsewhere")
                directory.write_text("no directory")

    run = Run(plain, lambda: keras.optimizers.SGD(0.01), shared_path / "checkpoints")
    _, history = run(Vanishes(), every="epoch")
    assert history["missed"] == [0.0] * EPOCHS
    sys.stderr.flush()
    said = capfd.readouterr().err
    assert said.count("NO CHECKPOINT WAS WRITTEN: Not a directory") == (EPOCHS if WORLD.is_root else 0), said


def test_the_library_callback(shared_path: Path) -> None:
    random = np.random.default_rng(WORLD.rank)
    x, y = random.normal(size=(24, 6)).astype("f"), random.normal(size=(24, 1)).astype("f")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    def train(*callbacks: Any, save: bool = True) -> tuple[Any, Any]:
        model = plain()
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        stopping = keras.callbacks.EarlyStopping("loss", patience=50)
        own = [Checkpoint(shared_path / "c", "2steps", grace_seconds=GRACE_SECONDS, callbacks=[stopping])]
        given = [DataParallel(), stopping, *callbacks, *(own if save else [])]
        history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=given)
        return model, history.history

    undisturbed, expected = train(save=False)
    with pytest.raises(SystemExit):
        train(Signals(WORLD.size - 1, 1, 2))
    _, info = newest(shared_path / "c")
    assert info["position"]["step"] in (3, 4, 5)
    assert info["counters"][0]["callback"] == "EarlyStopping"
    resumed, history = train()
    assert numbers(resumed) == numbers(undisturbed)
    assert history == expected
