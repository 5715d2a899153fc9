"""Convolutional autoencoder that reads a PyDataset."""

import json

import keras
import numpy as np


class Images(keras.utils.PyDataset):
    def __init__(self, images, batch_size):
        super().__init__()
        self.images, self.batch_size = images, batch_size

    def __len__(self):
        return len(self.images) // self.batch_size

    def __getitem__(self, index):
        batch = self.images[index * self.batch_size : (index + 1) * self.batch_size]
        return batch, batch


keras.utils.set_random_seed(4)
images = np.random.random((72, 8, 8, 1)).astype("float32")
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"),
    ]
)
model.compile("adam", "mse")
history = model.fit(Images(images, 12), epochs=3, shuffle=False, verbose=0)
print("RESULT", json.dumps(history.history))
