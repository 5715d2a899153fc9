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
    """Collective: train a model for some steps, with checkpoints."""
    from mpitrain.world.start import init

    world = init()
    if world.is_root:
        note(directory, BEGUN)
    import keras
    import tensorflow as tf

    from mpitrain.bench.workload import optimizer, workload
    from mpitrain.checkpoint.options import CheckpointOptions
    from mpitrain.data.source import Samples, Share, assemble
    from mpitrain.trainer.trainer import Trainer

    victim = world.rank == world.size - 1 and FAULT not in dict(events(directory))

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(STEP_SECONDS)
            if world.is_root:
                note(directory, STEP)
            if victim and batch + 1 == FAULT_STEP:
                time.sleep(10 * STEP_SECONDS)  # until the others have noted this step
                note(directory, FAULT)
                os.kill(os.getpid(), signal.SIGKILL)

    load = workload(name, batch_size, seed=world.rank)

    def read(positions: Any) -> Any:
        """The samples of the one batch, again and again."""
        return positions.map(lambda p: (tf.gather(load.inputs, p % batch_size), tf.gather(load.labels, p % batch_size)))

    trainer = Trainer(
        load.model,
        optimizer=optimizer(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
        batch_size=batch_size,
        callbacks=[Noting()],
        checkpoints=CheckpointOptions(directory / "checkpoints", f"{CHECKPOINT_STEPS}steps", keep=1),
        progress=False,
        world=world,
    )
    samples = Samples(STEPS * batch_size * world.size, read)
    share = Share(0.0, 0, world.rank, world.size)
    trainer.fit(assemble(samples, share, num_classes=load.model.output_shape[-1], description=name))
