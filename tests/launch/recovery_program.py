"""A training in a program of its own, on numbered samples, that notes which ones each step took: DIRECTORY.

Each rank writes `steps-SIZE-RANK`: in each line the number of the step in the whole training, and its samples.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import mpitrain

SAMPLES, BATCH, EPOCHS, SEED = 60, 2, 4, 7
STEP_SECONDS = 0.15


def main(directory: Path) -> None:
    world = mpitrain.init()
    (directory / f"begun-{world.size}-{world.rank}").touch()
    import keras
    import numpy as np
    import tensorflow as tf

    from mpitrain.data.load import load
    from mpitrain.training.checkpoint.options import Options

    steps = open(directory / f"steps-{world.size}-{world.rank}", "w", buffering=1)  # noqa: SIM115, PTH123

    def note(numbers: Any) -> None:
        # Finished steps are counted there, also those of an earlier process.
        print((world.activity.steps or 0) + 1, *(int(number) for number in numbers), file=steps)
        time.sleep(STEP_SECONDS)

    class Numbered(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> Any:
            tf.numpy_function(note, [data[0][:, 0]], [])
            return super().train_step(data)

    numbers = np.arange(SAMPLES, dtype=np.float32)[:, None]
    np.savez(directory / f"samples-{world.rank}.npz", x=numbers, y=numbers / SAMPLES)
    source = load(
        str(directory / f"samples-{world.rank}.npz"),
        validation_split=0.0,
        seed=SEED,
        rank=world.rank,
        size=world.size,
        task="regression",
    )
    model = Numbered()
    model(numbers[:1])
    trainer = mpitrain.Trainer(
        model,
        optimizer=keras.optimizers.SGD(1e-4),
        batch_size=BATCH,
        epochs=EPOCHS,
        checkpoints=Options(directory / "checkpoints", "3steps"),
        progress=False,
    )
    trainer.fit(source)
    if world.is_root:
        print("trained", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
