"""tf.data with augmentation, an endless data set and steps_per_epoch."""

import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(9)
images = np.random.random((48, 6, 6, 1)).astype("float32")
labels = np.random.randint(0, 3, 48)


def augment(index, image, label):
    seed = tf.stack([tf.cast(index, tf.int32), 0])
    return tf.image.stateless_random_flip_left_right(image, seed), label


dataset = (
    tf.data.Dataset.from_tensor_slices((np.arange(48), images, labels))
    .map(augment, num_parallel_calls=2)
    .batch(12)
    .repeat()
    .prefetch(2)
)
model = keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(dataset, epochs=2, steps_per_epoch=4, verbose=0)
print("RESULT", json.dumps(history.history))
