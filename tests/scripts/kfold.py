"""Cross-validation: a new model, a fit and an evaluation for each fold."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(11)
x = np.random.normal(size=(63, 4)).astype("float32")
y = (x[:, 0] > 0).astype("float32")
folds = np.array_split(np.random.permutation(63), 3)
scores = []
for held in folds:
    kept = np.setdiff1d(np.arange(63), held)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x[kept], y[kept], batch_size=6, epochs=2, shuffle=False, verbose=0)
    scores.append(model.evaluate(x[held], y[held], verbose=0))
print("RESULT", json.dumps({"scores": [value for score in scores for value in score]}))
