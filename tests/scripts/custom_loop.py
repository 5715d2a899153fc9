"""A loop of its own with GradientTape."""

import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(8)
x = np.random.normal(size=(60, 6)).astype("float32")
y = (x[:, :1] * 2).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)


@tf.function
def step(inputs, wanted):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - wanted))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


losses = [float(step(inputs, wanted)) for _ in range(3) for inputs, wanted in dataset]
print("RESULT", json.dumps({"loss": losses}))
