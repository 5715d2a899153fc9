"""Horovod's process sets, Adasum, partial forms, timeline, elastic state and graphs of TensorFlow 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain.horovod.keras as hvd_keras
import mpitrain.horovod.tensorflow as hvd
from mpitrain.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpitrain.horovod.elastic import HostUpdateResult

hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
RANKS = list(range(SIZE))
several = pytest.mark.skipif(SIZE == 1, reason="there are no others")
v1 = tf.compat.v1


def own(rank: int = RANK) -> np.ndarray:
    return np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * rank


@several
@pytest.mark.mpich
@pytest.mark.ranks(1, 2, 3, 4)
def test_process_sets() -> None:
    first, last = hvd.add_process_set([0]), hvd.ProcessSet(range(1, SIZE))
    assert last.size() is None
    assert hvd.add_process_set(last) is last
    assert (first.process_set_id, last.process_set_id) == (1, 2)
    assert (first.included(), last.size()) == (RANK == 0, SIZE - 1)
    with pytest.raises(ValueError, match="same ranks"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match="different ranks"):
        hvd.add_process_set([SIZE])
    assert [int(hvd.process_set_included_op(number)) for number in (0, 1, 2, 3)] == [1, RANK == 0, RANK > 0, -3]
    mine, other, ranks = (first, last, [0]) if RANK == 0 else (last, first, RANKS[1:])
    assert mine.rank() == ranks.index(RANK)
    with pytest.raises(ValueError, match="not part of"):
        other.rank()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
        hvd.allreduce(1.0, process_set=other)
    np.testing.assert_allclose(hvd.allreduce(own(), process_set=mine), np.mean([own(r) for r in ranks], 0))
    np.testing.assert_allclose(hvd.allgather(own(), process_set=mine), np.concatenate([own(r) for r in ranks]))
    np.testing.assert_allclose(hvd.broadcast(own(), ranks[-1], process_set=mine), own(ranks[-1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="root rank"):
        hvd.broadcast(1.0, 0 if RANK else 1, process_set=mine)
    assert hvd.allgather_object(RANK, process_set=mine) == ranks
    assert hvd.broadcast_object(RANK, ranks[-1], process_set=mine) == ranks[-1]
    tape = hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, process_set=last)
    w = tf.Variable(float(RANK))
    with tape:
        loss = w * (RANK + 1.0)
    assert float(tape.gradient(loss, w)) == (1.0 if RANK == 0 else sum(r + 1 for r in RANKS[1:]))
    assert float(w) == RANK  # it stays what it was
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=last)
    v = keras.Variable(0.0)
    optimizer.apply([tf.constant(RANK + 1.0)], [v])
    assert float(v.numpy()) == pytest.approx(-1.0 if RANK == 0 else -np.mean([r + 1 for r in RANKS[1:]]))
    assert hvd.remove_process_set(last)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: RANKS}
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(1.0, process_set=first)


@pytest.mark.ranks(2)
@pytest.mark.mpich
def test_init_with_communicators_and_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    own_half = everyone.Split(RANK % 2, RANK)
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.size()
    half, alone = hvd.ProcessSet(own_half), hvd.ProcessSet([0])
    hvd.init(everyone, process_sets=[half] if SIZE < 3 else [half, alone])
    assert half.ranks == [rank for rank in RANKS if rank % 2 == RANK % 2]
    np.testing.assert_allclose(hvd.allreduce(own(), process_set=half), np.mean([own(r) for r in half.ranks], 0))
    hvd.shutdown()
    with pytest.raises(ValueError, match="duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet(RANKS)])
    hvd.shutdown()
    hvd.init([RANK])
    assert (hvd.size(), hvd.rank(), float(hvd.allreduce(3.0))) == (1, 0, 3.0)
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    hvd.init()
    if SIZE > 1:
        with pytest.raises(ValueError, match="dynamic"):
            hvd.add_process_set([0])


@pytest.mark.mpich
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.skipif(SIZE & (SIZE - 1) != 0, reason="Adasum is for powers of two")
@pytest.mark.parametrize("graph", [False, True])
def test_adasum(graph: bool) -> None:
    vectors = [np.random.default_rng(rank).normal(size=11) for rank in RANKS]
    call = tf.function(hvd.allreduce) if graph else hvd.allreduce
    result = call(tf.constant(vectors[RANK]), op=hvd.Adasum)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b for a, b in pairs]
    np.testing.assert_allclose(result, vectors[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="floating-point"):
        hvd.allreduce(1, op=hvd.Adasum)


def test_partial_tape_and_optimizer() -> None:
    for scale in (True, False):
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        net = keras.Sequential([keras.Input((1,)), *layers])
        with tf.GradientTape() as recorder:
            loss = tf.reduce_sum(net(tf.constant([[RANK + 1.0]])))
        tape = hvd.PartialDistributedGradientTape(recorder, local_layers=layers[0], scale_local_gradients=scale)
        local, common = tape.get_local_and_global_gradients(loss, net.trainable_variables)
        assert [v is layers[0].kernel for v, _ in local] == [True]
        assert float(local[0][1][0, 0]) == pytest.approx((RANK + 1.0) / (SIZE if scale else 1))
        assert float(common[0][1][0, 0]) == pytest.approx(np.mean([rank + 1.0 for rank in RANKS]))
        net = keras.Sequential([keras.Input((1,)), *layers])
        start = float(RANK)
        for layer in layers:
            layer.kernel.assign([[start + 1.0]])
        optimizer = hvd_keras.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=[layers[0]], scale_local_gradients=scale
        )
        gradient = tf.constant([[RANK + 1.0]])
        optimizer.apply([gradient, gradient], net.trainable_variables)
        moved = [start + 1.0 - float(layer.kernel.numpy()[0, 0]) for layer in layers]
        expected = (RANK + 1.0) / (SIZE if scale else 1), sum(rank + 1.0 for rank in RANKS) / SIZE
        assert moved == [pytest.approx(value) for value in expected]


@pytest.mark.ranks(2)
def test_compression_rounds_to_half_precision_on_the_way() -> None:
    values = [np.float32(0.1) * (rank + 1) for rank in RANKS]
    expected = float(np.sum([np.float16(value) for value in values], dtype=np.float32)) / SIZE
    reduced = hvd.allreduce(values[RANK], compression=hvd.Compression.fp16)
    assert reduced.dtype == tf.float32
    assert float(reduced) == pytest.approx(expected, rel=1e-3)
    w = tf.Variable(1.0)
    with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.fp16) as tape:
        loss = w * values[RANK]
    gradient = tape.gradient(loss, w)
    assert gradient.dtype == tf.float32
    assert SIZE == 1 or float(gradient) == float(np.float16(gradient))
    assert float(gradient) == pytest.approx(expected, rel=1e-3)


@pytest.mark.ranks(2)
def test_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(own(), name="weights")
    hvd.stop_timeline()
    hvd.allreduce(own())
    events = json.loads((path if RANK == 0 else tmp_path / f"timeline.rank-{RANK}.json").read_text())
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"allreduce.weights"}
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(spans) == {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"}
    assert spans["NEGOTIATE_ALLREDUCE"]["ts"] <= spans["ALLREDUCE"]["ts"]
    assert any(event["name"] == "CYCLE_START" for event in events)


def test_elastic_state_goes_back_on_all_ranks() -> None:
    """One rank fails while the others are in a collective."""
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    net.layers[0].kernel.assign([[float(RANK)]])
    state: Any = hvd_keras.elastic.KerasState(net, batch=0, failures=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    seen: list[tuple[int, float]] = []

    @hvd_keras.elastic.run
    def train(state: Any) -> float:
        while state.batch < 4:
            seen.append((state.batch, float(net.layers[0].kernel.numpy()[0, 0])))
            net.layers[0].kernel.assign_add([[1.0]])
            if state.batch == 2 and len(resets) == 0 and RANK == SIZE - 1:
                raise HorovodInternalError("lost")
            hvd.allreduce(own())
            state.batch += 1
            if state.batch == 3 and len(resets) == 1 and RANK == 0:
                state.on_hosts_updated(1.0, HostUpdateResult.added)
            if state.batch % 2 == 0 or state.batch == 3:
                state.commit()
        return float(net.layers[0].kernel.numpy()[0, 0])

    assert train(state) == 4.0  # from rank 0's
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0)]
    assert resets == [2, 3]
    with pytest.raises(ValueError, match="built"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
    assert HostsUpdatedInterrupt(True).skip_sync


@pytest.mark.ranks(2)
def test_graphs_of_tensorflow_1() -> None:
    """Sessions run operations in any order, and only those asked for."""
    mean = np.mean([rank + 1.0 for rank in RANKS])
    with tf.Graph().as_default():
        parts = [hvd.allreduce(tf.fill([n + 1], RANK + 1.0)) for n in range(8)]
        total = tf.add_n([tf.reduce_sum(part) for part in parts])
        wrong = hvd.allreduce(tf.zeros([RANK + 1]))
        w, u = (v1.get_variable(name, initializer=RANK + 1.0, use_resource=True) for name in "wu")
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        step = optimizer.minimize(w * w * (RANK + 1.0) + u * (RANK + 1.0))
        several_steps = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2)
        accumulate = several_steps.minimize(u * (RANK + 1.0), var_list=[u])
        slope = tf.gradients(hvd.broadcast(w, 0) * (RANK + 1.0), w)[0]
        with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
            assert session.run([w, u]) == [1.0, 1.0]
            assert session.run(total) == pytest.approx(36 * mean)
            if SIZE > 1:
                with pytest.raises(tf.errors.FailedPreconditionError, match="ranks call different collectives"):
                    session.run(wrong)
            session.run(step)
            np.testing.assert_allclose(session.run([w, u]), [1 - 0.2 * mean, 1 - 0.1 * mean], rtol=1e-6)
            session.run(accumulate)
            np.testing.assert_allclose(session.run(u), 1 - 0.1 * mean, rtol=1e-6)
            session.run(accumulate)
            np.testing.assert_allclose(session.run(u), 1 - 0.3 * mean, rtol=1e-6)
            assert session.run(slope) == pytest.approx(mean if RANK == 0 else 0.0)


@pytest.mark.ranks(2)
def test_variables_are_broadcast_inside_a_function() -> None:
    variables = [tf.Variable(float(RANK)), keras.Variable(float(RANK))]

    @tf.function
    def step() -> None:
        hvd.broadcast_variables(variables, SIZE - 1)

    step()
    assert [float(v.numpy()) for v in variables] == [SIZE - 1.0] * 2
    values = hvd.broadcast_([tf.Variable(float(RANK))], 0)
    assert float(values[0]) == 0.0


@pytest.mark.ranks(2)
def test_momentum_is_corrected_where_steps_are_compiled() -> None:
    """Goyal et al.: where the rate changes, the velocity gathered at the old rate is scaled with it."""
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), lambda y, p: p, jit_compile=False)
    rates = [0.1, 0.3, 0.3]
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: rates[int(epoch)] / 0.1)
    net.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=2, epochs=3, callbacks=[schedule], verbose=0)
    weight = velocity = 0.0
    for before, rate in zip([0.1, *rates], rates, strict=False):  # the slope is 1
        velocity = 0.5 * rate / before * velocity - rate
        weight += velocity
    assert float(net.get_weights()[0][0, 0]) == pytest.approx(weight, rel=1e-5)
    assert net.optimizer.get_config()["momentum"] == 0.5
