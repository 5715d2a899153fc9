"""Keras' own `fit`, data-parallel: what is added to a script for one process is marked with `# <-`.

Run it with `mpirun -np 2 python examples/keras_fit.py`, or alone.
"""

import mpitrain

world = mpitrain.init()  # <- before TensorFlow looks at the machine

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
    dataset = dataset.shuffle(2000, seed=1, reshuffle_each_iteration=False)
    test, train = dataset.take(300), dataset.skip(300).shuffle(2000, seed=2)

    train = mpitrain.shard(train)  # <- this rank's samples; behind the shuffle, before the batch
    test = mpitrain.shard(test)  # <-

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=mpitrain.DistributedOptimizer(keras.optimizers.Adam(0.003)),  # <- averages the gradients
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [mpitrain.callbacks.DataParallel()]  # <- first: the numbers of all ranks for the others
    model.fit(train.batch(32), epochs=12, shuffle=False, callbacks=callbacks, verbose=2 if world.is_root else 0)
    results = model.evaluate(test.batch(32), callbacks=callbacks, return_dict=True, verbose=0)
    if world.is_root:  # <-
        print(f"test accuracy {results['accuracy']:.3f} on {world.size} ranks")


if __name__ == "__main__":
    main()
