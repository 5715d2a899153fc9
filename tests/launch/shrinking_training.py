"""A training whose weights tell which samples made them, while ranks kill themselves.

    mpirun --with-ft ulfm ... python shrinking_training.py DIRECTORY STRATEGY RANK:WHEN:NUMBER:MILLISECONDS ...

A rank dies so many milliseconds after update NUMBER (WHEN is `update`), after the beginning of the NUMBER-th validation
(`test`), while it writes its NUMBER-th checkpoint or a later one (`checkpoint`), or after its last update (`end`); or
after update NUMBER it makes a file `reached-RANK`, and waits to be killed (`reach`), or dies at once (`at`).

A sample is one 1 among zeros, and the loss the sum of all outputs: each update adds, to the weights of its samples
alone, one over their number. So the weights at the end follow from the order of each epoch, and from how many ranks
there were at each update; a sample that is left out or seen twice, an update of which a part is missing, or a mean over
ranks that are gone, shows.

STRATEGY is `all-reduce`; or `ps`: rank 0 hosts the parameters, and each of the others makes an update of each of its
samples when it comes to it. Then every sample adds one to its weights in every epoch, whoever has it; but the first
gradient of a worker does not count if another one has made an update before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np

import mpitrain
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.data.arrays import array_samples
from mpitrain.data.sharding import EpochOrder
from mpitrain.data.source import DataSource, Share, assemble
from mpitrain.strategies.all_reduce import AllReduce
from mpitrain.strategies.strategy import strategy_of
from mpitrain.trainer.shrinkable_run import LostRanks

SAMPLES, WIDTH, BATCH, EPOCHS, SEED = 331, 1000, 4, 5, 3
directory, strategy, *kills = sys.argv[1:]
world = mpitrain.init(on_failure="shrink")
number = world.rank
if strategy == "ps":
    WIDTH, BATCH = 100, 1
    world = mpitrain.ParameterServer(mode="async").start()
me, ranks = world.rank, world.size


class Death(keras.callbacks.Callback):
    """Of this rank, at a moment that was chosen."""

    def __init__(self) -> None:
        super().__init__()
        own = next((kill.split(":") for kill in kills if int(kill.split(":")[0]) == number), ["", "", "0", "0"])
        self.when, self.number, self.milliseconds = own[1], int(own[2]), float(own[3])
        self.tests, self.checkpoints = 0, set[threading.Thread]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.when == "update" and world.activity.updates >= self.number:
            self.when = ""
            self.die()
        if self.when == "checkpoint":
            self.checkpoints |= {thread for thread in threading.enumerate() if thread.name == "mpitrain checkpoint"}
            if len(self.checkpoints) == self.number:
                self.when = ""
                self.die()
        if self.when == "at" and world.activity.updates == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.when == "reach" and world.activity.updates == self.number:
            Path(directory, f"reached-{number}").touch()
            time.sleep(600)

    def on_test_begin(self, logs: Any = None) -> None:
        self.tests += 1
        if self.when == "test" and self.tests == self.number:
            self.die()

    def on_train_end(self, logs: Any = None) -> None:
        if self.when == "end":
            self.die()

    def die(self) -> None:
        threading.Timer(self.milliseconds / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()


def data() -> DataSource:
    ones = np.eye(SAMPLES, dtype=np.float32)
    nothing = np.zeros((SAMPLES, 1 + WIDTH), np.float32)
    share = Share(0.0, SEED, me, ranks)
    return assemble(
        array_samples(ones, nothing),
        share,
        num_classes=None,
        description="ones",
        validation=array_samples(ones[:40], nothing[:40]),
        test=array_samples(ones[:40], nothing[:40]),
    )


def model() -> Any:
    inputs = keras.Input((SAMPLES,))
    # One bucket is summed at once, the other one around a ring.
    narrow = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
    wide = keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="zeros")(inputs)
    return keras.Model(inputs, keras.layers.Concatenate()([narrow, wide]))


def expected(losses: tuple[LostRanks, ...]) -> Any:
    """The weights, computed from the order of samples and the numbers of ranks alone."""
    left = {loss.update: loss.left for loss in losses}
    order, weights = EpochOrder(np.arange(SAMPLES), SEED), np.zeros(SAMPLES)
    size, updates = ranks, 0
    for epoch in range(EPOCHS):
        samples = order.of_epoch(epoch)
        while len(samples):
            used, samples = np.split(samples, [BATCH * size])
            weights[used] += 1 / len(used)
            updates += 1
            size = left.get(updates, size)
    return weights


trained = model()
summary = mpitrain.Trainer(
    trained,
    optimizer=keras.optimizers.SGD(1.0),
    loss=lambda labels, outputs: -keras.ops.sum(outputs, axis=-1),
    metrics=[],
    batch_size=BATCH,
    epochs=EPOCHS,
    callbacks=[Death()],
    checkpoints=CheckpointOptions(Path(directory, "checkpoints"), "10steps") if strategy == "all-reduce" else None,
    progress=False,
).fit(data(), directory)
narrow, wide = (np.asarray(weights) for weights in trained.get_weights())
updates = world.activity.updates
if strategy == "ps":
    lacking = np.flatnonzero(narrow[:, 0] != EPOCHS)
    assert len(lacking) < ranks, f"samples {lacking} were seen {narrow[lacking, 0]} times"
    assert (narrow[lacking, 0] == EPOCHS - 1).all(), f"samples {lacking} were seen {narrow[lacking, 0]} times"
    updates = round(narrow[:, 0].sum())
else:
    np.testing.assert_allclose(narrow[:, 0], expected(summary.losses), rtol=1e-5)
    exchanging = strategy_of(world)
    assert isinstance(exchanging, AllReduce)
    native = exchanging.reducer.native
    print(f"buckets of Python: {'all' if native is None else native.left_to_python}", flush=True)
assert (wide == narrow).all(), "an update was made in part"
assert {name: len(values) for name, values in summary.history.items()} == {"loss": EPOCHS, "val_loss": EPOCHS}
assert int(trained.optimizer.iterations.numpy()) == updates
print(
    f"rank {number} is {world.rank} of {world.size}, after {world.activity.updates} updates, "
    f"with weights {zlib.crc32(wide.tobytes()):08x}",
    flush=True,
)
