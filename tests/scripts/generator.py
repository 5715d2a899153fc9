"""A Python generator of batches, without an end."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(13)
x = np.random.normal(size=(40, 4)).astype("float32")


def batches():
    while True:
        for start in range(0, 40, 10):
            part = x[start : start + 10]
            yield part, part.sum(axis=1, keepdims=True)


model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(batches(), epochs=2, steps_per_epoch=4, verbose=0)
print("RESULT", json.dumps(history.history))
