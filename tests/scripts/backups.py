"""A run that ends in the middle and goes on: BackupAndRestore, ModelCheckpoint, TensorBoard, tf.train.Checkpoint."""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "backups"
x = np.random.default_rng(3).normal(size=(60, 4)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")


class PowerCut(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("power cut")


def train(*callbacks):
    keras.utils.set_random_seed(8)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    history = model.fit(x, y, batch_size=12, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, history.history["loss"]


backup = keras.callbacks.BackupAndRestore(str(directory / "backup"), save_freq=3, delete_checkpoint=False)
each_epoch = keras.callbacks.ModelCheckpoint(str(directory / "{epoch}.weights.h5"), save_weights_only=True)
boards = []
if importlib.util.find_spec("tensorboard"):  # TensorFlow does not bring it
    boards = [keras.callbacks.TensorBoard(str(directory / "board"), histogram_freq=1, write_graph=False)]
_, whole = train(each_epoch, *boards)
try:
    train(keras.callbacks.BackupAndRestore(str(directory / "epochs")), PowerCut())
except RuntimeError as error:
    print("interrupted by a", error)
model, rest = train(keras.callbacks.BackupAndRestore(str(directory / "epochs")))
train(backup)

slots = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=tf.Variable(7))
manager = tf.train.CheckpointManager(slots, str(directory / "slots"), max_to_keep=2)
saved = manager.save()
before = [float(np.abs(v.numpy()).sum()) for v in model.weights]
for variable in model.weights:
    variable.assign(tf.zeros_like(variable))
slots.step.assign(0)
slots.restore(manager.latest_checkpoint).assert_existing_objects_matched()
again = tf.train.CheckpointManager(slots, str(directory / "slots"), max_to_keep=2).restore_or_initialize()
after = [float(np.abs(v.numpy()).sum()) for v in model.weights]

third = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])
third.load_weights(directory / "4.weights.h5")
last = float(np.abs(third.predict(x, verbose=0) - y).mean())
files = sorted(path.name for path in directory.glob("*.weights.h5"))
events = len(list((directory / "board" / "train").glob("events*"))) - len(boards)
print(
    "RESULT",
    json.dumps(
        {
            "whole": whole,
            "rest": rest,
            "restored": after,
            "as saved": [abs(a - b) for a, b in zip(after, before)],
            "step": [int(slots.step.numpy()), len(files), events, int(saved == again), len(manager.checkpoints)],
            "last": [last],
            "left": [int((directory / "backup").exists()), int((directory / "epochs").exists())],
        }
    ),
)
