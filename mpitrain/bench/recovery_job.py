"""A training job that loses its last rank in the middle, once, and notes what happened when.

Every line of the file is an event: a word, and seconds since the epoch. All ranks add to one file, which they share as
they do the directory.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

EVENTS = "events"
BEGUN, STEP, FAULT = "begun", "step", "fault"
CHECKPOINT_STEPS, FAULT_STEP, STEPS = 10, 25, 60
STEP_SECONDS = 0.02  # at least, so that a step is long beside the noting of it


def note(directory: Path, event: str) -> None:
    """Local: add an event."""
    with (directory / EVENTS).open("a") as file:
        file.write(f"{event} {time.time():.6f}\n")


def events(directory: Path) -> list[tuple[str, float]]:
    """Local: those so far, in the order noted."""
    path = directory / EVENTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], float(line.split()[1])) for line in lines]


def main(name: str, batch_size: int, directory: Path) -> None:
    """Collective: train a model for some steps, with checkpoints.

    Args:
        name: one of `workload.MODELS`.
        batch_size: of each rank.
        directory: for events and checkpoints.
    """
    from mpitrain.comm.world import init

    world = init()
    if world.is_root:
        note(directory, BEGUN)
    import keras
    import tensorflow as tf

    from mpitrain.bench.workload import optimizer, workload
    from mpitrain.training.callbacks import DataParallel
    from mpitrain.training.checkpoint.callback import Checkpoint

    victim = world.rank == world.size - 1 and FAULT not in dict(events(directory))

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(STEP_SECONDS)
            if world.is_root:
                note(directory, STEP)
            if victim and batch + 1 == FAULT_STEP:
                note(directory, FAULT)
                os.kill(os.getpid(), signal.SIGKILL)

    load = workload(name, batch_size, seed=world.rank)
    load.model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensors((load.inputs, load.labels)).repeat(STEPS)
    checkpoint = Checkpoint(directory / "checkpoints", f"{CHECKPOINT_STEPS}steps", keep=1)
    load.model.fit(data, epochs=1, verbose=0, callbacks=[DataParallel(), Noting(), checkpoint])
