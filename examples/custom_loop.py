"""A training loop of one's own, data-parallel: what is added for several ranks is marked with `# <-`.

Run it with `mpirun -np 2 python examples/custom_loop.py`, or alone.
"""

import mpitrain

world = mpitrain.init()  # <- before TensorFlow looks at the machine

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

EPOCHS = 12
BATCH_SIZE = 32


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
    dataset = dataset.shuffle(2000, seed=1, reshuffle_each_iteration=False)
    test, train = dataset.take(300), dataset.skip(300)
    train = train.take(len(train) // world.size * world.size)  # <- as many steps on each rank
    train = mpitrain.shard(train.shuffle(2000, seed=2)).batch(BATCH_SIZE)  # <- this rank's samples

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.003)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    mpitrain.broadcast_variables(model.variables + optimizer.variables)  # <- all start from rank 0's

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:  # <- averages the gradients
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables, samples=tf.shape(x)[0])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(EPOCHS):
        losses = [float(step(x, y)) for x, y in train]
        loss = np.mean(mpitrain.all_gather_obj(np.mean(losses)))  # <- of all ranks
        if world.is_root:  # <-
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)

    mpitrain.verify_replicas(model.variables)  # <- all ranks hold the same model
    if world.is_root:  # <-
        hits = [np.argmax(model(x), axis=-1) == y.numpy() for x, y in test.batch(100)]
        print(f"test accuracy {np.concatenate(hits).mean():.3f} on {world.size} ranks")


if __name__ == "__main__":
    main()
