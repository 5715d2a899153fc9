"""A training in a program of its own, on numbered samples, that notes which ones each step took: DIRECTORY.

Each rank writes `steps-SIZE-RANK`: in each line the number of the step in the whole training, and its samples. Tests
ask here which these were.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECOVERY_PROGRAM = __file__
SAMPLES, BATCH, EPOCHS, SEED = 60, 2, 4, 7
STEP_SECONDS = 0.15


def text_of(path: Path) -> str:
    """What is in a file, if there is one."""
    return path.read_text() if path.exists() else ""


def samples_taken(directory: Path, ranks: int) -> dict[int, list[int]]:
    """What all ranks of an attempt took in each step, in the order in which samples are dealt out."""
    taken: dict[int, list[list[int]]] = {}
    for rank in range(ranks):
        for line in text_of(directory / f"steps-{ranks}-{rank}").splitlines():
            step, *numbers = map(int, line.split())
            taken.setdefault(step, []).append(numbers)
    return {
        step: [n for row in itertools.zip_longest(*rows) for n in row if n is not None] for step, rows in taken.items()
    }


def in_order(taken: Mapping[int, list[int]]) -> list[int]:
    """Those of all steps, one after the other."""
    return [number for step in sorted(taken) for number in taken[step]]


def each_once() -> list[int]:
    """What the steps must have taken: each sample once in every epoch, in the order that follows from the seed."""
    import numpy as np

    orders = [np.random.default_rng([SEED, 2, epoch]).permutation(SAMPLES) for epoch in range(EPOCHS)]
    return [int(number) for order in orders for number in order]


def main(directory: Path) -> None:
    import mpitrain

    world = mpitrain.init()
    (directory / f"begun-{world.size}-{world.rank}").touch()
    import keras
    import numpy as np
    import tensorflow as tf

    from mpitrain.checkpoint.options import CheckpointOptions
    from mpitrain.data.load import load

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
        checkpoints=CheckpointOptions(directory / "checkpoints", "3steps"),
        progress=False,
    )
    trainer.fit(source)
    if world.is_root:
        print("trained", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
