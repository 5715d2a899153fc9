"""Losses that divide by something else than rows: masked steps, sums, one number of a whole batch; single batches."""

import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(9)
lengths = np.where(np.arange(44) % 2 == 0, 2, 9)
words = np.where(np.arange(9) < lengths[:, None], np.random.randint(1, 7, (44, 9)), 0)
tags = (words * 5) % 4

inputs = keras.Input((9,), dtype="int32")
hidden = keras.layers.Embedding(7, 5, mask_zero=True)(inputs)
model = keras.Model(
    inputs, keras.layers.Dense(4, activation="softmax")(keras.layers.LSTM(6, return_sequences=True)(hidden))
)
model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
masked = model.fit(words, tags, batch_size=12, epochs=3, shuffle=False, validation_data=(words, tags), verbose=0)

x = np.random.normal(size=(44, 5)).astype("float32")
y = (x[:, :2] > 0).astype("float32")


def own(true, predicted):
    return tf.reduce_sum((true - predicted) ** 2) / 12


results = {"masked_" + name: values for name, values in masked.history.items()}
for name, loss in (
    ("sum", keras.losses.MeanSquaredError(reduction="sum")),
    ("dice", keras.losses.Dice()),
    ("own", own),
):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), loss)
    results[name] = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history["loss"]
    results[name + "_batches"] = [float(model.train_on_batch(x[:10], y[:10])) for _ in range(2)]
    results[name + "_weights"] = model.get_weights()[0].sum(axis=1).tolist()
print("RESULT", json.dumps(results))
