"""Functional model on arrays: validation split, class weights, early stopping."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(1)
x = np.random.normal(size=(203, 12)).astype("float32")
y = (x[:, 0] + x[:, 1] > 0).astype("int32")

inputs = keras.Input((12,))
hidden = keras.layers.Dense(16, activation="tanh")(inputs)
outputs = keras.layers.Dense(2, activation="softmax")(hidden)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=24,
    epochs=6,
    shuffle=False,
    validation_split=0.2,
    class_weight={0: 1.0, 1: 2.0},
    callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02)],
    verbose=0,
)
print("RESULT", json.dumps(history.history))
