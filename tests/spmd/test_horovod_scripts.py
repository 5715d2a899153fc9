"""What scripts for Horovod and Keras 2 say, and the numbers of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain.horovod.keras as hvd_keras
import mpitrain.horovod.tensorflow as hvd
import mpitrain.horovod.tensorflow.keras as hvd_tf_keras

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROWS, STEPS = 6, 4  # of a global batch that 1, 2 and 3 ranks divide
pytestmark = pytest.mark.skipif(ROWS % SIZE != 0, reason="as many rows for each rank")
X = np.random.default_rng(3).normal(size=(ROWS * STEPS, 4))
Y = X.sum(1, keepdims=True) * np.where(np.arange(len(X)) % ROWS < ROWS // 2, 0.01, 100.0)[:, None]
MINE = np.concatenate(
    [np.arange(k * ROWS, (k + 1) * ROWS)[RANK * ROWS // SIZE :][: ROWS // SIZE] for k in range(STEPS)]
)


def network(kind: Any = keras.Model) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,), dtype="float64")
    hidden = keras.layers.Dense(5, activation="tanh", dtype="float64")(inputs)
    return kind(inputs, keras.layers.Dense(1, dtype="float64")(hidden))


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(net(x) - y))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("way", ["eager", "function", "optimizer"])
def test_gradients_are_clipped_after_their_mean(way: str) -> None:
    """Steps where one rank's gradient is large, and the others' are small."""
    plain = network()
    plain.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse", jit_compile=False)
    plain.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    net = network()
    if way == "optimizer":
        net.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=1.0)), "mse")
        net.fit(X[MINE], Y[MINE], batch_size=ROWS // SIZE, shuffle=False, verbose=0)
    else:
        optimizer = keras.optimizers.SGD(0.1)

        def step(x: Any, y: Any, first: bool) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(net, x, y)
            found = hvd.DistributedGradientTape(tape).gradient(loss, net.trainable_variables)
            clipped, _ = tf.clip_by_global_norm(found, 1.0)
            optimizer.apply_gradients(zip(clipped, net.trainable_variables, strict=True))
            if first:
                hvd.broadcast_variables(net.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables(), root_rank=0)

        train = tf.function(step, autograph=False) if way == "function" else step
        for k, rows in enumerate(np.split(MINE, STEPS)):
            train(tf.constant(X[rows]), tf.constant(Y[rows]), k == 0)
    for mine, expected in zip(net.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("module", [hvd, hvd_tf_keras], ids=["tensorflow", "keras"])
def test_collectives_within_a_train_step(module: Any) -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(self, x, y)
            found = hvd.DistributedGradientTape(tape).gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
            hvd.allreduce(loss, name="unused")
            near = tf.reduce_sum(tf.cast(tf.abs(self(x) - y) < 1.0, tf.float64))
            return {"loss": module.allreduce(loss, op=hvd.Average), "near": module.allreduce(near, op=hvd.Sum)}

    plain, expected = network(), []
    optimizer = keras.optimizers.SGD(1e-3)
    for rows in np.split(np.arange(len(X)), STEPS):
        with tf.GradientTape() as tape:
            loss = loss_of(plain, X[rows], Y[rows])
        found = tape.gradient(loss, plain.trainable_variables)
        optimizer.apply_gradients(zip(found, plain.trainable_variables, strict=True))
        expected.append([float(loss), float(np.sum(np.abs(plain(X[rows]).numpy() - Y[rows]) < 1.0))])
    seen: list[list[float]] = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([float(logs["loss"]), float(logs["near"])])

    net = network(Own)
    net.compile(keras.optimizers.SGD(1e-3), jit_compile=False)
    net.fit(X[MINE], Y[MINE], batch_size=ROWS // SIZE, shuffle=False, verbose=0, callbacks=[See()])
    np.testing.assert_allclose(seen, expected, rtol=1e-12)
    for mine, right in zip(net.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-12)


@pytest.mark.usefixtures("double_precision")
def test_what_the_docs_say_of_weights() -> None:
    """A loss of the whole batch through all-gather, and batches of different sizes."""

    def of_whole_batch(outputs: Any) -> Any:
        return tf.reduce_logsumexp(tf.matmul(outputs, outputs, transpose_b=True))

    def gradient(rows: Any, loss: Any, **options: Any) -> list[np.ndarray]:
        net = network()
        with tf.GradientTape() as tape:
            value = loss(net(X[rows]))
        return [g.numpy() for g in tape_of(tape, **options).gradient(value, net.trainable_variables)]

    def tape_of(tape: Any, alone: bool = False, **options: Any) -> Any:
        return tape if alone else hvd.DistributedGradientTape(tape, **options)

    whole = gradient(slice(0, ROWS), of_whole_batch, alone=True)
    gathered = gradient(MINE[: ROWS // SIZE], lambda own: of_whole_batch(hvd.allgather(own)), op=hvd.Sum)
    uneven = (
        slice(0, 1) if RANK == 0 and SIZE > 1 else np.array_split(np.arange(SIZE > 1, ROWS), max(1, SIZE - 1))[RANK - 1]
    )
    rows = len(X[uneven])
    factor = rows * SIZE / int(hvd.allreduce(rows, op=hvd.Sum))
    mean = gradient(slice(0, ROWS), lambda own: tf.reduce_mean(own**2), alone=True)
    weighted = gradient(uneven, lambda own: tf.reduce_mean(own**2) * factor)
    for found, expected in ((gathered, whole), (weighted, mean)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(1, 2)
def test_words_of_keras_2(shared_path: Path) -> None:
    optimizer = tf.keras.optimizers.legacy.SGD(0.1, momentum=0.5)
    net = network()
    net.compile(hvd_tf_keras.DistributedOptimizer(optimizer), "mse", experimental_run_tf_function=False)
    net.fit(X[MINE], Y[MINE], batch_size=ROWS // SIZE, verbose=0)
    assert [v is w for v, w in zip(optimizer.variables(), optimizer.variables, strict=True)] == [True] * 6
    assert len(keras.optimizers.LossScaleOptimizer(optimizer).variables()) == 8
    tf.keras.backend.set_value(net.optimizer.lr, 0.2 * tf.keras.backend.get_value(optimizer.lr))
    assert float(optimizer.learning_rate.numpy()) == pytest.approx(0.02)
    optimizer.lr = 0.5
    assert float(tf.keras.backend.get_value(net.optimizer.lr)) == 0.5
    path = shared_path / "model.keras"
    if RANK == 0:
        net.save(path)
    assert hvd.broadcast_object(path.name) == "model.keras"
    for loaded in (keras.models.load_model(path), hvd_keras.load_model(path, compression=hvd.Compression.fp16)):
        assert type(loaded.optimizer) is keras.optimizers.SGD  # compiled as it was saved
    variable = keras.Variable(0.0)
    loaded.optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16)
    loaded.optimizer.apply([tf.constant(1.0 + 2**-20)], [variable])
    assert float(variable.numpy()) == (-1.0 if SIZE > 1 else np.float32(-1.0 - 2**-20))
    assert not hvd.gpu_available("tensorflow")
    assert not hvd_keras.gpu_available()


@pytest.mark.ranks(1, 2)
@pytest.mark.mpich
def test_a_communicator_for_the_script() -> None:
    comm = hvd.global_process_set.mpi_comm
    assert (comm.Get_rank(), comm.Get_size()) == (RANK, SIZE)
    assert comm.allgather(RANK) == list(range(SIZE))
    for collective in (hvd_keras.allreduce, hvd_keras.allgather, hvd_keras.reducescatter):
        assert isinstance(collective(np.ones([SIZE])), tf.Tensor)
    assert isinstance(hvd_keras.broadcast(1.0, 0), tf.Tensor)
