"""Horovod's names: collectives with their gradients, optimizers, tapes, callbacks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain.horovod.keras as hvd_keras
import mpitrain.horovod.tensorflow as hvd
import mpitrain.horovod.tensorflow.keras as hvd_tf_keras
from mpitrain.errors import UsageError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
both_ways = pytest.mark.parametrize("way", [lambda f: f, functools.partial(tf.function, autograph=False)])
several = pytest.mark.skipif(SIZE == 1, reason="there is nobody to differ from")


def own(rank: int = RANK, rows: int = 3) -> np.ndarray:
    return np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 10 * rank


def test_topology() -> None:
    hvd.init()
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size()) == (RANK, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.mpi_built()
    assert not hvd.nccl_built()
    assert int(hvd.rank_op()) == RANK
    assert int(hvd.size_op()) == SIZE
    assert hvd.global_process_set.ranks == list(range(SIZE))


@both_ways
def test_allreduce_scales_and_compresses(way: Any) -> None:
    total = sum(own(rank) for rank in range(SIZE))
    reduce = way(functools.partial(hvd.allreduce, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5))
    np.testing.assert_allclose(reduce(own()), total)
    np.testing.assert_allclose(
        way(functools.partial(hvd.allreduce, compression=hvd.Compression.fp16))(own()), total / SIZE
    )
    assert [x.numpy().tolist() for x in hvd.grouped_allreduce([1, 2], op=hvd.Max)] == [1, 2]
    assert hvd.allreduce(np.float64(RANK), average=False).numpy() == sum(range(SIZE))
    slices = hvd.allreduce(tf.IndexedSlices(tf.constant(own()), tf.constant([0, 1, 2]), tf.constant([5, 2])))
    np.testing.assert_allclose(tf.convert_to_tensor(slices)[:3], total / SIZE)


@both_ways
def test_gradients_of_collectives(way: Any) -> None:
    def gradient(function: Any, x: Any) -> Any:
        def of(value: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(value)
                # The upstream gradient is rank + 1 everywhere.
                result = tf.reduce_sum(function(value)) * (RANK + 1.0)
            return tape.gradient(result, value)

        return way(of)(tf.constant(x)).numpy()

    everyone = sum(rank + 1.0 for rank in range(SIZE))
    ones = np.ones((3, 2))
    np.testing.assert_allclose(gradient(functools.partial(hvd.allreduce, op=hvd.Sum), own()), ones * everyone)
    scaled = functools.partial(hvd.allreduce, prescale_factor=2.0, postscale_factor=0.25)
    np.testing.assert_allclose(gradient(scaled, own()), ones * everyone / SIZE / 2)
    rows = RANK + 1
    np.testing.assert_allclose(gradient(hvd.allgather, own(rows=rows)), np.ones((rows, 2)) * everyone / SIZE)
    sent = gradient(lambda x: hvd.broadcast(x, SIZE - 1), own())
    np.testing.assert_allclose(sent, ones * (everyone / SIZE if RANK == SIZE - 1 else 0.0))
    expected = np.repeat(np.arange(SIZE) + 1.0, 2).reshape(SIZE, 2)
    np.testing.assert_allclose(gradient(hvd.alltoall, own(rows=SIZE)), expected)
    np.testing.assert_allclose(gradient(hvd.reducescatter, own(rows=SIZE)), expected)
    summed = functools.partial(hvd.reducescatter, op=hvd.Sum)
    np.testing.assert_allclose(gradient(summed, own(rows=SIZE)), expected * SIZE)


def test_gather_alltoall_and_scatter() -> None:
    gathered = hvd.allgather(own(rows=RANK + 1))
    np.testing.assert_allclose(gathered, np.concatenate([own(rank, rank + 1) for rank in range(SIZE)]))
    assert hvd.allgather(RANK).numpy().tolist() == list(range(SIZE))
    result, received = hvd.alltoall(own(rows=SIZE), splits=[1] * SIZE)
    assert received.numpy().tolist() == [1] * SIZE
    np.testing.assert_allclose(result, np.stack([own(rank, SIZE)[RANK] for rank in range(SIZE)]))
    variable = tf.Variable(float(RANK))
    hvd.broadcast_([variable], SIZE - 1)
    assert float(variable) == SIZE - 1
    assert hvd.broadcast_object({"rank": RANK}, 0) == {"rank": 0}
    assert hvd.allgather_object(RANK) == list(range(SIZE))
    assert hvd.broadcast_object_fn(0)(RANK) == 0


INVALID, PRECONDITION = tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError
LAST = RANK == SIZE - 1
DIFFER: dict[str, tuple[Any, Any, str]] = {
    "shape": (lambda: hvd.allreduce(tf.zeros([3 if LAST else 2])), PRECONDITION, r"float32\[3\]"),
    "op": (lambda: hvd.allreduce(1.0, op=hvd.Max if LAST else hvd.Min), PRECONDITION, r"all_reduce\(max\)"),
    "name": (lambda: hvd.allreduce(1.0, name="b" if LAST else "a"), PRECONDITION, "named 'b'"),
    "factor": (lambda: hvd.allreduce(1.0, prescale_factor=2.0 if LAST else 1.0), PRECONDITION, "factors 2 and 1"),
    "root": (lambda: hvd.broadcast(tf.zeros(2), RANK), PRECONDITION, "broadcast from rank 0"),
    "columns": (lambda: hvd.allgather(tf.zeros([2, 3 if LAST else 2])), PRECONDITION, r"float32\[\*, 3\]"),
    "splits": (
        lambda: hvd.alltoall(tf.zeros([SIZE]), [7 if LAST else 1] * SIZE),
        INVALID,
        "add up to all rows",
    ),
    "parts": (lambda: hvd.alltoall(tf.zeros([SIZE + 1])), INVALID, "add up to all rows"),
}


@several
@both_ways
@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_differ_are_told(way: Any, name: str) -> None:
    call, error, text = DIFFER[name]
    with pytest.raises(error, match=f"(?s){text}"):
        way(call)()
    assert int(hvd.allreduce(1, op=hvd.Sum)) == SIZE


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: hvd.reducescatter(1.0), INVALID),
        (lambda: hvd.broadcast(1.0, SIZE), INVALID),
        (lambda: hvd.alltoall(tf.zeros([SIZE]), tf.ones([SIZE])), ValueError),
        (lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum), ValueError),
        (lambda: hvd.allreduce(1.0, op=17), ValueError),
        (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum), NotImplementedError),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum), ValueError),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=0), ValueError),
        (lambda: hvd.DistributedOptimizer(None), UsageError),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0), ValueError),
        (lambda: hvd.broadcast_global_variables(0), RuntimeError),
    ],
)
def test_wrong_arguments(call: Any, error: Any) -> None:
    with pytest.raises(error):
        call()


def test_integers_are_averaged_towards_zero() -> None:
    total = sum(-3 * rank - 1 for rank in range(SIZE))
    assert int(hvd.allreduce(tf.constant(-3 * RANK - 1))) == int(total / SIZE)
    half = hvd.allreduce(tf.constant([7, -7]), op=hvd.Sum, postscale_factor=0.5)
    assert half.numpy().tolist() == [int(3.5 * SIZE), int(-3.5 * SIZE)]


def model(seed: int = RANK) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    "module", [hvd, *(pytest.param(other, marks=pytest.mark.ranks(2)) for other in (hvd_keras, hvd_tf_keras))]
)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_optimizers(module: Any, op: str) -> None:
    net = model()
    optimizer = module.DistributedOptimizer(keras.optimizers.SGD(0.01), op=getattr(hvd, op))
    net.compile(optimizer, "mse", jit_compile=False)
    net.fit(
        own(), own()[:, :1], batch_size=3, verbose=0,
        callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)],
    )  # fmt: skip
    reference = model(0)
    gradients = []
    for rank in range(SIZE):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(own(rank)[:, :1] - reference(own(rank))))
        gradients.append([g.numpy() for g in tape.gradient(loss, reference.trainable_variables)])
    factor = 1.0 if op == "Sum" else 1.0 / SIZE
    for position, (mine, start) in enumerate(zip(net.weights, reference.weights, strict=True)):
        expected = start.numpy() - 0.01 * factor * sum(g[position] for g in gradients)
        np.testing.assert_allclose(mine.numpy(), expected, rtol=2e-5, atol=1e-6)


def test_tape_and_accumulation() -> None:
    w = tf.Variable(1.0)
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        loss = w * float(RANK + 1)
    assert float(tape.gradient(loss, w)) == sum(range(1, SIZE + 1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    v = keras.Variable(0.0)
    optimizer.build([v])
    for value in (1.0, 2.0):
        optimizer.apply([tf.constant(value)], [v])
    assert float(v.numpy()) == -3.0  # Horovod adds the passes up


def test_sync_batch_normalization() -> None:
    everyone = np.concatenate([own(rank, rank + 2) for rank in range(SIZE)])
    layer, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    mine = own(rows=RANK + 2)
    result, wanted = layer(mine, training=True), plain(everyone, training=True)
    start = sum(rank + 2 for rank in range(RANK))
    np.testing.assert_allclose(result, wanted[start : start + RANK + 2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-5)


def test_callbacks_average_and_set_rates(shared_path: Path) -> None:
    net = model(0)
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)

    class Says(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["own"] = float(RANK)

    callbacks = hvd_keras.callbacks
    history = net.fit(
        own(rows=4) / 50, own(rows=4)[:, :1] / 50, batch_size=2, epochs=3, verbose=0,
        callbacks=[
            Says(),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
            callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5, start_epoch=2),
        ],
    ).history  # fmt: skip
    np.testing.assert_allclose(history["own"], [np.mean(range(SIZE))] * 3)
    np.testing.assert_allclose(history["lr"], [(1 + (SIZE - 1) / 2) / SIZE * 0.1, 0.1, 0.05], rtol=1e-5)
    path = shared_path / "model.keras"
    if RANK == 0:
        net.save(path)
    hvd.allgather_object(0)
    loaded = hvd_keras.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert hvd_keras.allreduce(float(RANK), average=False) == sum(range(SIZE))


@pytest.mark.mpich
def test_join_takes_part_in_collectives_and_updates() -> None:
    w = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([w])
    for _ in range(2 if RANK == 0 else 1):
        optimizer.apply([tf.constant(1.0)], [w])
    if RANK == 0 and SIZE > 1:  # the others have joined
        np.testing.assert_allclose(hvd.allreduce(own()), own(0) / SIZE)
        np.testing.assert_allclose(hvd.allreduce(own() - 5, op=hvd.Min), own(0) - 5)
        np.testing.assert_allclose(hvd.allgather(own()), own(0))
        scaled = hvd.allreduce(tf.ones(400_000), postscale_factor=4.0)  # each rank makes a part of it
        np.testing.assert_allclose(scaled, 4.0 / SIZE, rtol=1e-6)
    assert int(hvd.join()) == 0
    assert float(w.numpy()) == pytest.approx(-2.0)
    if SIZE > 1:
        with pytest.raises(PRECONDITION, match="out of data" if RANK == 0 else "no data left"):
            hvd.broadcast(1.0, 0) if RANK == 0 else hvd.join()
