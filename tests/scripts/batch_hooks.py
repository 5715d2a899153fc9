"""Callbacks that look at batches, beside a train_step of its own whose logs have names of their own."""

import json

import keras
import numpy as np
import tensorflow as tf


class Denoiser(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(4, activation="tanh")
        self.decoder = keras.layers.Dense(6)
        self.total = keras.metrics.Mean(name="total_tracker")

    def call(self, inputs):
        return self.decoder(self.encoder(inputs))

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(data - self(data, training=True)), axis=1)
            loss = tf.reduce_mean(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.total.update_state(errors)
        return {"loss": self.total.result(), "latest": loss}


class WarmUp(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps, self.losses = 0, []

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        self.model.optimizer.learning_rate = 0.2 * min(1.0, self.steps / 10)

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["latest"])
        if len(self.losses) > 9 and logs["loss"] < 1.16:
            self.model.stop_training = True


keras.utils.set_random_seed(7)
x = np.random.normal(size=(73, 6)).astype("float32")  # the last batch has one row
model = Denoiser()
model.compile(keras.optimizers.SGD())
warm_up, numbers = WarmUp(), []
note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: numbers.append(logs["loss"]))
history = model.fit(
    x, batch_size=12, epochs=6, shuffle=False, verbose=0, callbacks=[warm_up, note, keras.callbacks.TerminateOnNaN()]
)
found = {"losses": warm_up.losses, "numbers": numbers, "steps": [warm_up.steps]}
print("RESULT", json.dumps({**history.history, **found}))
