"""Files with names that differ from process to process, files that are removed, and numbers drawn without a seed."""

import csv
import datetime
import json
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
x = np.random.normal(size=(48, 4)).astype("float32")
y = x @ np.array([[1.0], [2.0], [-1.0], [0.5]], "float32")
found = {}


def made():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def train(place, name):
    """What is written there by callbacks, by the model and by the script, read again in each way."""
    model = made()
    best, log = os.path.join(place, "best.keras"), os.path.join(place, "log.csv")
    os.makedirs(place, exist_ok=True)
    callbacks = [
        keras.callbacks.ModelCheckpoint(best, monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(os.path.join(place, "{epoch:02d}.weights.h5"), save_weights_only=True),
        keras.callbacks.CSVLogger(log),
    ]
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    model.save(os.path.join(place, "last.keras"))
    loss = keras.models.load_model(best).evaluate(x, y, verbose=0)
    rows = list(csv.DictReader(open(log)))
    first = made()
    first.load_weights(sorted(str(path) for path in Path(place).glob("*.h5"))[0])
    sizes = [len(rows), len(os.listdir(place)), os.path.getsize(os.path.join(place, "last.keras")) > 1000]
    found[name] = [loss, float(rows[-1]["loss"]), first.evaluate(x, y, verbose=0), *map(float, sizes)]


train(os.path.join(directory, datetime.datetime.now().strftime("%Y%m%d-%H%M%S.%f")), "clock")
train(os.path.join(directory, f"run-{len(os.listdir(directory))}-{os.getpid()}"), "number")
with tempfile.TemporaryDirectory() as place:
    train(place, "temporary")
manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(3.0)), f"{directory}/{uuid.uuid4()}", 2)
for _ in range(3):
    manager.save()
manager.checkpoint.v.assign(1.0)
manager.checkpoint.restore(manager.latest_checkpoint)
tf.saved_model.save(manager.checkpoint, f"{directory}/saved-{os.getpid()}")
loaded = tf.saved_model.load(f"{directory}/saved-{os.getpid()}")
found["checkpoints"] = [float(manager.checkpoint.v), len(manager.checkpoints), float(loaded.v)]

out = os.path.join(directory, "out")
for _ in range(3):
    if os.path.exists(out):
        shutil.rmtree(out)
    os.makedirs(out)
    made().save(os.path.join(out, "model.keras"))
    Path(out, "own.txt").write_text("own")
    os.replace(os.path.join(out, "own.txt"), os.path.join(out, "final.txt"))
    assert sorted(os.listdir(out)) == ["final.txt", "model.keras"]
Path(out, "final.txt").unlink()
try:
    Path(out, "final.txt").unlink()
except FileNotFoundError as error:
    found["absent"] = [error.errno]
tf.io.gfile.rmtree(out)
writer = tf.summary.create_file_writer(f"{directory}/events")
with writer.as_default():
    tf.summary.write("number", 1.0, step=0)
writer.close()
found["files"] = [float(os.path.exists(out)), len(os.listdir(f"{directory}/events"))]

names = list({f"name {number}" for number in range(20)})  # in an order of their hashes
order = np.random.default_rng().permutation(48)
model = made()
model.fit(x[order], y[order], batch_size=48, epochs=2, shuffle=False, verbose=0)
labels = np.array([names.index(f"name {number % 20}") for number in range(48)])
classes = keras.Sequential([keras.Input((20,)), keras.layers.Dense(20)])
classes.compile(keras.optimizers.Adam(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rows = np.eye(20, dtype="float32")[np.arange(48) % 20]
classes.fit(rows, labels, batch_size=48, epochs=20, shuffle=False, verbose=0)
right = np.mean(classes.predict(rows, verbose=0).argmax(1) == labels)
found["drawn"] = [model.evaluate(x, y, verbose=0), float(right)]
print("RESULT", json.dumps(found))
