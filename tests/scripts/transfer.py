"""Transfer learning: a frozen base first, then the whole model at a lower rate."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(10)
x = np.random.random((60, 8, 8, 3)).astype("float32")
y = np.random.randint(0, 2, 60).astype("float32")
base = keras.Sequential(
    [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.GlobalAveragePooling2D()]
)
base.trainable = False
model = keras.Sequential([keras.Input((8, 8, 3)), base, keras.layers.Dense(1)])
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.05), loss)
first = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
base.trainable = True
model.compile(keras.optimizers.Adam(0.001), loss)
second = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
print("RESULT", json.dumps({"loss": first.history["loss"] + second.history["loss"]}))
