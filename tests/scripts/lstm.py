"""LSTM on text: vectorized words, sample weights, a learning rate that follows the loss."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(5)
words = ["good", "bad", "fine", "poor", "film", "plot", "cast", "end"]
texts = [" ".join(np.random.choice(words, 6)) for _ in range(80)]
labels = np.array([text.count("good") + text.count("fine") > 1 for text in texts], "float32")
vectorize = keras.layers.TextVectorization(output_sequence_length=6)
vectorize.adapt(texts)
tokens = np.array(vectorize(texts))

model = keras.Sequential([keras.layers.Embedding(12, 4), keras.layers.LSTM(6), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.5), keras.losses.BinaryCrossentropy(from_logits=True), weighted_metrics=["mae"])
history = model.fit(
    tokens,
    labels,
    sample_weight=np.linspace(0.5, 1.5, 80),
    batch_size=18,
    epochs=3,
    shuffle=False,
    callbacks=[
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.5),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.evaluate(tokens, labels, verbose=0)),
    ],
    verbose=0,
)
print("RESULT", json.dumps({**history.history, "rate": [float(model.optimizer.learning_rate)]}))
