"""Files: the best model, a log of the epochs, and the model loaded again."""

import csv
import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(12)
directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
x = np.random.normal(size=(50, 3)).astype("float32")
y = x @ np.array([[1.0], [2.0], [3.0]], "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
best = directory / "best.keras"
callbacks = [
    keras.callbacks.ModelCheckpoint(str(best), monitor="val_loss", save_best_only=True),
    keras.callbacks.CSVLogger(str(directory / "epochs.csv")),
]
model.fit(x, y, batch_size=10, epochs=3, shuffle=False, validation_data=(x, y), callbacks=callbacks, verbose=0)
loaded = keras.models.load_model(best)
model.save(directory / "last.keras")
with (directory / "epochs.csv").open() as file:
    rows = list(csv.DictReader(file))
again = keras.models.load_model(directory / "last.keras")
difference = float(np.abs(again.predict(x, verbose=0) - model.predict(x, verbose=0)).max())
losses = [float(row["val_loss"]) for row in rows]
print("RESULT", json.dumps({"val": losses, "best": [loaded.evaluate(x, y, verbose=0)], "difference": [difference]}))
