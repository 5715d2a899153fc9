"""Subclassed model with a train_step of its own and a metric of its own."""

import json

import keras
import numpy as np
import tensorflow as tf


class Regression(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.out = keras.layers.Dense(1)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.error.update_state(y, predicted)
        return {"error": self.error.result()}


keras.utils.set_random_seed(2)
x = np.random.normal(size=(90, 5)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = Regression()
model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0)
print("RESULT", json.dumps(history.history))
