"""A small GAN trained batch by batch, with two optimizers."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(3)
real = np.random.normal(2.0, 0.5, size=(96, 2)).astype("float32")
generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
critic.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
frozen = keras.models.clone_model(critic)
frozen.trainable = False
both = keras.Sequential([keras.Input((3,)), generator, frozen])
both.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))

losses = {"critic": [], "generator": []}
for start in range(0, 96, 24):
    noise = np.random.normal(size=(24, 3)).astype("float32")
    fake = generator.predict(noise, verbose=0)
    samples = np.concatenate([real[start : start + 24], fake])
    labels = np.concatenate([np.ones((24, 1)), np.zeros((24, 1))]).astype("float32")
    losses["critic"].append(float(critic.train_on_batch(samples, labels)[0]))
    frozen.set_weights(critic.get_weights())
    losses["generator"].append(float(both.train_on_batch(noise, np.ones((24, 1), "float32"))))
# Fewer rows for a rank than there are ranks.
losses["critic"].append(float(critic.train_on_batch(samples[22:26], labels[22:26])[0]))
print("RESULT", json.dumps(losses))
