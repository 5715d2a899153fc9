"""One transformer block on a tf.data pipeline."""

import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(6)
tokens = np.random.randint(0, 20, (70, 8))
labels = tokens[:, 0] % 3

inputs = keras.Input((8,), dtype="int32")
embedded = keras.layers.Embedding(20, 8)(inputs)
attended = keras.layers.MultiHeadAttention(2, 4)(embedded, embedded)
normal = keras.layers.LayerNormalization()(embedded + attended)
outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(normal))
model = keras.Model(inputs, outputs)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
dataset = tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(12)
history = model.fit(dataset, validation_data=dataset.take(3), epochs=3, verbose=0)
results = model.evaluate(dataset, verbose=0, return_dict=True)
print("RESULT", json.dumps({**history.history, **{name: [value] for name, value in results.items()}}))
