"""Several inputs and outputs, by name."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(7)
data = {"left": np.random.normal(size=(60, 4)), "right": np.random.normal(size=(60, 3))}
targets = {"total": data["left"].sum(axis=1), "sign": (data["right"][:, 0] > 0).astype("float32")}

left, right = keras.Input((4,), name="left"), keras.Input((3,), name="right")
joined = keras.layers.Dense(8, activation="relu")(keras.layers.concatenate([left, right]))
total = keras.layers.Dense(1, name="total")(joined)
sign = keras.layers.Dense(1, activation="sigmoid", name="sign")(joined)
model = keras.Model({"left": left, "right": right}, {"total": total, "sign": sign})
model.compile(
    keras.optimizers.SGD(0.05, global_clipnorm=1.0),
    {"total": "mse", "sign": "binary_crossentropy"},
    loss_weights={"total": 0.5, "sign": 1.0},
    metrics={"total": ["mae"], "sign": ["accuracy"]},
)
history = model.fit(data, targets, batch_size=12, epochs=3, shuffle=False, verbose=0)
print("RESULT", json.dumps(history.history))
