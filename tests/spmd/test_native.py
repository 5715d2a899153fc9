"""Gradients exchanged by machine code: the bits and the messages of Python's way, and none of Python's time."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.callbacks import DataParallel
from mpitrain.collectives import native_session
from mpitrain.collectives.host import Reduction
from mpitrain.collectives.native_engine import NativeEngine, usable
from mpitrain.collectives.registry import engine_of
from mpitrain.errors import AgreedError, MismatchError, NonFiniteError
from mpitrain.native import operation
from mpitrain.native.operation import NAME
from mpitrain.reduction.buckets import BucketPlan, TensorSpec, plan_buckets
from mpitrain.reduction.graph import mean_gradients
from mpitrain.reduction.reducer import Reducer
from mpitrain.strategies.all_reduce import AllReduce

WORLD = mpitrain.init()
pytestmark = [
    pytest.mark.mpich,
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.skipif(WORLD.size > 1 and isinstance(usable(WORLD), str), reason="no machine code here"),
]
FIRST, UPDATES = 5, 9  # Python makes the first ones
PLANS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "one": [("float32", (3,))],
    "small": [("float32", (7, 3)), ("float32", ()), ("float64", (5,)), ("float16", (33,)), ("bfloat16", (4, 1))],
    "empty": [("float32", (0, 4)), ("float32", (2,))],
    "large": [("float32", (701, 1000)), ("float64", (140_001,)), ("float32", (9,))],
    "halves": [("bfloat16", (300_001,)), ("float16", (300_000,)), ("float16", (1_100_000,))],
    "many": [("float32", (size,)) for size in range(1, 300, 7)],
}
Samples = Callable[[int, int], float]
SAMPLES: dict[str, Samples] = {
    "equal": lambda rank, update: 8.0,
    "unequal": lambda rank, update: 3.0 + rank,
    "none on one rank": lambda rank, update: 0.0 if rank == update % WORLD.size else 4.0,
    "broken": lambda rank, update: 0.1 + rank / 3,
    "none": lambda rank, update: 0.0,
}


def values(update: int, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
    numbers = np.random.default_rng([update, WORLD.rank])
    return [tf.cast(tf.constant(numbers.normal(size=spec.shape)), spec.dtype) for spec in specs]


def plan_of(name: str, added_up: bool = False) -> BucketPlan:
    specs = [TensorSpec(f"v{i}", shape, dtype) for i, (dtype, shape) in enumerate(PLANS[name])]
    return plan_buckets(specs, title=f"test of {name}", added_up=added_up)


class Job:
    """One way to exchange a plan again and again."""

    def __init__(self, engine: str, plan: BucketPlan, in_graph: bool = True) -> None:
        self.plan = plan
        self.reducer = Reducer(WORLD.communicator, WORLD.agreement, WORLD.all_reduce)
        collectives = engine_of(WORLD, engine)

        def exchange(gradients: Sequence[tf.Tensor], samples: tf.Tensor) -> list[tf.Tensor]:
            own = [gradient + 0 for gradient in gradients]  # which nothing else holds: summed in place
            means: list[tf.Tensor] = mean_gradients(collectives, self.reducer, plan, own, samples)
            return means

        self.graph = tf.function(exchange, autograph=False) if in_graph else exchange

    def __call__(self, update: int, samples: Samples, own: Sequence[tf.Tensor] | None = None) -> list[Any]:
        given = values(update, self.plan.specs) if own is None else own
        count = tf.constant(samples(WORLD.rank, update), tf.float64)
        return [mean.numpy() for mean in self.graph(given, count)]

    @property
    def left_to_python(self) -> int:
        assert self.reducer.native is not None
        return self.reducer.native.left_to_python


@contextlib.contextmanager
def summed_by(way: str) -> Iterator[None]:
    before = WORLD.all_reduce.chosen
    WORLD.all_reduce.choose(way)
    yield
    if before is not None:
        WORLD.all_reduce.choose(before)


def compare_bits(native: Job, python: Job) -> None:
    """Of the means of one plan, after the first updates with any samples and both ways to sum."""
    cases = [(case, way) for case in SAMPLES for way in ("ring:65536:4", "mpi")]
    for update, (case, way) in enumerate([*cases[:1] * UPDATES, *cases]):
        with summed_by(way):
            ours, theirs = native(update, SAMPLES[case]), python(update, SAMPLES[case])
        for one, other in zip(ours, theirs, strict=True):
            assert (one.shape, one.tobytes()) == (other.shape, other.tobytes()), f"update {update}, {case}, {way}"


@pytest.mark.parametrize("added_up", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_the_bits_are_those_of_python(name: str, added_up: bool) -> None:
    plan = plan_of(name, added_up)
    native, python = Job("native", plan), Job("host", plan)
    compare_bits(native, python)
    own, other = native.reducer, python.reducer
    assert own.statistics.updates == other.statistics.updates
    assert own.statistics.samples_global == pytest.approx(other.statistics.samples_global)
    assert own.agreed is not None
    assert other.agreed is not None
    np.testing.assert_array_equal(own.agreed.samples, other.agreed.samples)
    rounded = 0 if added_up else 2  # whose sum is not exact, so that Python adds it up
    assert native.left_to_python == FIRST + rounded


@pytest.mark.parametrize("in_graph", [True, False])
def test_ranks_may_go_different_ways(in_graph: bool) -> None:
    """The messages are the same: one without machine code may be among them."""
    for name in ("small", "large"):
        plan = plan_of(name)
        job, other = Job("host" if WORLD.rank == 0 else "native", plan, in_graph), Job("host", plan)
        with summed_by("ring:65536:4"):
            for update in range(UPDATES):
                position = WORLD.activity.position
                ours = job(update, SAMPLES["unequal"])
                middle = WORLD.activity.position
                theirs = other(update, SAMPLES["unequal"])
                assert middle - position == WORLD.activity.position - middle
                for one, two in zip(ours, theirs, strict=True):
                    np.testing.assert_array_equal(one, two)


def test_python_is_not_asked() -> None:
    plan = plan_of("many")
    job = Job("native", plan)
    for update in range(FIRST + UPDATES):
        job(update, SAMPLES["unequal"])
    assert job.left_to_python == FIRST
    assert WORLD.activity.inside is None


def test_rows_go_the_way_of_python_in_between() -> None:
    specs = [TensorSpec("a", (40,), "float32"), TensorSpec("rows", (9, 2), "float32", sparse=True)]
    specs += [TensorSpec("b", (300_000,), "float32"), TensorSpec("c", (300_000,), "float32")]
    plan = plan_buckets(specs, title="with rows")
    dense, slices = (
        [specs[0], *specs[2:]],
        tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, WORLD.rank]), tf.constant([9, 2])),
    )
    means = {}
    for name in ("native", "host"):
        reducer, engine = Reducer(WORLD.communicator, WORLD.agreement, WORLD.all_reduce), engine_of(WORLD, name)

        @tf.function(autograph=False)
        def exchange(first: Any, *rest: Any, engine: Any = engine, reducer: Any = reducer) -> list[Any]:
            own = [first + 0, slices, *[one + 0 for one in rest]]
            found: list[Any] = mean_gradients(engine, reducer, plan, own, 2.0)
            return found

        with summed_by("ring:65536:4"):
            for update in range(UPDATES):
                means[name] = [tf.convert_to_tensor(mean).numpy() for mean in exchange(*values(update, dense))]
        assert reducer.statistics.updates == UPDATES
    for one, other in zip(means["native"], means["host"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_traced_to_its_rank(name: str, bad: float, capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(name)
    job = Job("native", plan)
    with summed_by("ring:65536:4"):
        for update in range(UPDATES):
            job(update, SAMPLES["equal"])
        assert "not finite" not in capfd.readouterr().err
        own = values(UPDATES, plan.specs)
        if WORLD.rank == WORLD.size - 1:
            own[0] = tf.concat([tf.fill([1, own[0].shape[1]], tf.constant(bad, own[0].dtype)), own[0][1:]], 0)
        job(UPDATES, SAMPLES["equal"], own)
    told = capfd.readouterr().err
    if WORLD.rank == 0:
        count = own[0].shape[1]
        found = f"{count:,} NaN, 0 infinite" if np.isnan(bad) else f"0 NaN, {count:,} infinite"
        assert f"first in v0 on rank {WORLD.size - 1}" in told
        assert found in told


def test_what_ranks_call_differently_is_told_on_all() -> None:
    one, other = Job("native", plan_of("one")), Job("native", plan_of("small"))
    for update in range(UPDATES):
        one(update, SAMPLES["equal"])
        other(update, SAMPLES["equal"])
    job = one if WORLD.rank == 0 else other
    with pytest.raises(tf.errors.UnknownError, match="MismatchError: ranks call different collectives"):
        job(0, SAMPLES["equal"])
    assert isinstance(WORLD.activity.error, MismatchError)
    WORLD.activity.error = None
    np.testing.assert_array_equal(one(1, SAMPLES["equal"])[0], Job("host", plan_of("one"))(1, SAMPLES["equal"])[0])


def test_ranks_that_run_out_of_data() -> None:
    """They take part with nothing in updates that machine code makes on the others."""
    strategy = WORLD.strategy
    assert isinstance(strategy, AllReduce)
    numbers = np.random.default_rng(WORLD.rank)
    inputs = numbers.normal(size=(8 * (7 + 5 * WORLD.rank), 4)).astype("f")
    weights = []
    for engine in ("native", "host"):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
        strategy.engine = engine
        model.compile(mpitrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        model.fit(inputs, inputs.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[DataParallel()])
        strategy.engine = None
        weights.append([np.asarray(variable) for variable in model.trainable_variables])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_graph_keeps_what_it_needs() -> None:
    """Its operations know it by address."""
    plan = plan_of("small")
    expected = Job("host", plan)(0, SAMPLES["equal"])
    job = Job("native", plan)
    job(0, SAMPLES["equal"])
    reducer, exchange = weakref.ref(job.reducer), job.graph
    del job
    gc.collect()
    assert reducer() is not None
    for _ in range(UPDATES):
        found = exchange(values(0, plan.specs), tf.constant(8.0, tf.float64))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    del exchange
    gc.collect()
    assert reducer() is None


def test_a_mean_that_is_not_finite_may_end_the_job() -> None:
    """What is raised is kept for who tells of it: TensorFlow wraps it."""
    job = Job("native", plan_of("one"))
    job.reducer.finite.action = "stop"
    for update in range(UPDATES):
        job(update, SAMPLES["equal"])
    with pytest.raises(tf.errors.UnknownError, match="NonFiniteError: the mean gradient is not finite"):
        job(UPDATES, SAMPLES["equal"], [tf.constant([1.0, np.nan, 2.0])])
    assert isinstance(WORLD.activity.error, NonFiniteError)
    WORLD.activity.error = None


def test_one_rank_of_a_host_tells_the_way(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(WORLD, "verbose", True)
    for way, words in (("python", "Python"), ("native", "machine code")):
        monkeypatch.setenv("MPITRAIN_ENGINE", way)
        engine_of.__wrapped__(WORLD)
        told = f"({WORLD.hosts[WORLD.rank]}): {words} exchanges what is to be combined: MPITRAIN_ENGINE={way}\n"
        assert (told in capfd.readouterr().err) == (WORLD.local_rank == 0)


def test_an_engine_that_is_made_while_a_graph_is_traced() -> None:
    made: list[NativeEngine] = []

    @tf.function(autograph=False)
    def trace() -> tf.Tensor:
        made.append(NativeEngine(WORLD))
        return tf.constant(1.0)

    trace()
    assert made[0].all_reduce(tf.ones([2]), Reduction("sum")).numpy().tolist() == [WORLD.size] * 2


def test_variables_may_be_exchanged_eagerly() -> None:
    plan = plan_of("one")
    count, own = tf.Variable(8.0, dtype=tf.float64), [tf.Variable(value) for value in values(0, plan.specs)]
    expected = Job("host", plan)(0, SAMPLES["equal"])
    reducer = Reducer(WORLD.communicator, WORLD.agreement, WORLD.all_reduce)
    for _ in range(UPDATES):
        means = mean_gradients(engine_of(WORLD, "native"), reducer, plan, own, count)
        np.testing.assert_array_equal(means[0].numpy(), expected[0])


def test_an_interrupt_of_an_eager_update_is_one() -> None:
    """No error of TensorFlow: who handles it looks for its kind."""

    def interrupted() -> bool:
        raise KeyboardInterrupt

    plan = plan_of("one")
    reducer = Reducer(WORLD.communicator, WORLD.agreement, WORLD.all_reduce)
    with pytest.raises(KeyboardInterrupt):
        mean_gradients(engine_of(WORLD, "native"), reducer, plan, values(0, plan.specs), 1.0, interrupted)
    means = mean_gradients(engine_of(WORLD, "native"), reducer, plan, values(0, plan.specs), 8.0)
    np.testing.assert_array_equal(means[0].numpy(), Job("host", plan)(0, SAMPLES["equal"])[0])


REDUCED = [("float32", (3, 2)), ("float64", ()), ("bfloat16", (33,)), ("float16", (0, 2)), ("float32", (70_001,))]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_in_a_graph_is_one_operation_with_the_bits_of_python(op: str) -> None:
    """In the order of the program, also between those that stay Python's."""
    engine = NativeEngine(WORLD)

    def results(engine: Any) -> Any:
        @tf.function(autograph=False)
        def step(turns: Any, *own: Any) -> list[Any]:
            found = [engine.all_reduce(one, Reduction(op), "named") for one in own]
            found.append(engine.all_reduce(tf.constant([WORLD.rank, 7]), Reduction(op)))
            found.append(engine.all_reduce(own[0], Reduction(op, after=3.0)))
            found.append(engine.broadcast(own[0], 0))
            found.append(engine.all_reduce(tf.boolean_mask(own[0], [True, False, True]), Reduction(op)))
            again = lambda i, one: (i + 1, tf.ensure_shape(engine.all_reduce(one, Reduction(op)), []))  # noqa: E731
            found.append(tf.while_loop(lambda i, _: i < turns, again, (0, own[1]))[1])
            return found

        return step

    native, python = results(engine), results(engine_of(WORLD, "host"))
    specs = [TensorSpec("", shape, dtype) for dtype, shape in REDUCED]
    with summed_by("ring:65536:4"):
        for update in range(3):
            own = values(update, specs)
            before = WORLD.activity.position
            ours = native(tf.constant(3), *own)
            middle = WORLD.activity.position
            theirs = python(tf.constant(3), *own)
            assert middle - before == WORLD.activity.position - middle
            for one, other in zip(ours, theirs, strict=True):
                assert (one.shape, one.numpy().tobytes()) == (other.shape, other.numpy().tobytes())
            mixed = (native if WORLD.rank == 0 else python)(tf.constant(3), *own)
            for one, other in zip(mixed, theirs, strict=True):
                assert one.numpy().tobytes() == other.numpy().tobytes()
    assert engine._session is not None
    assert engine._session.left_to_python == len(REDUCED) + 1  # each of them once
    (tensor,) = [
        op.outputs[0]
        for op in native.get_concrete_function(tf.constant(3), *own).graph.get_operations()
        if op.type == NAME
    ][:1]
    assert tensor.shape == REDUCED[0][1]


def test_errors_of_all_reduce_in_a_graph_are_those_of_python() -> None:
    for name in ("native", "host"):
        engine = engine_of(WORLD, name)

        @tf.function(autograph=False)
        def total(own: Any, engine: Any = engine) -> Any:
            return engine.all_reduce(own, Reduction("sum"))

        for _ in range(2):
            assert total(tf.ones([2])).numpy().tolist() == [WORLD.size] * 2
        with pytest.raises(tf.errors.FailedPreconditionError, match="MismatchError: ranks call different collectives"):
            total(tf.ones([2 + (WORLD.rank == 0)]))
        assert total(tf.ones([2])).numpy().tolist() == [WORLD.size] * 2
        with pytest.raises(AgreedError, match="has jit_compile=True"):
            tf.function(total.python_function, jit_compile=True, autograph=False)(tf.ones([2]))


def test_what_is_reduced_has_the_gradient_that_it_had() -> None:
    """None: those of Horovod's names are made around it."""
    own = tf.Variable([1.0, 2.0])
    for name in ("native", "host"):
        plain = tf.function(functools.partial(engine_of(WORLD, name).all_reduce, how=Reduction("sum")), autograph=False)
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(plain(own * 3.0))
            assert tape.gradient(loss, own) is None


def test_plans_of_graphs_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: one that was not ready when it was forgotten would be Python's for good."""
    monkeypatch.setattr(native_session, "MOST_PLANS", 2)
    plans = [plan_of(name) for name in ("one", "small", "empty", "many")]
    jobs = [Job("native", plan) for plan in plans]
    for job in jobs[1:]:
        job.reducer = jobs[0].reducer

        def exchange(gradients: Any, samples: Any, job: Job = job) -> Any:
            return mean_gradients(engine_of(WORLD, "native"), job.reducer, job.plan, gradients, samples)

        job.graph = tf.function(exchange, autograph=False)
    for update in range(FIRST):
        for job in jobs:
            job(update, SAMPLES["equal"])
    before = jobs[0].left_to_python
    for job in jobs:
        job(FIRST, SAMPLES["equal"])
    assert jobs[0].left_to_python == before


def test_a_graph_of_another_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses are of that one."""
    job = Job("native", plan_of("one"))
    job(0, SAMPLES["equal"])
    monkeypatch.setattr(operation, "process", lambda: 1)
    other = Job("native", plan_of("one"))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="another process has made this graph"):
        other(0, SAMPLES["equal"])


def test_eager_errors_are_those_of_python() -> None:
    for name in ("native", "host"):
        engine = engine_of(WORLD, name)
        for _ in range(3):
            own = tf.constant([1.0 + WORLD.rank, 2.0], tf.float64)
            mean = engine.all_reduce(own, Reduction("mean"))
            assert mean.numpy().tolist() == [1.0 + (WORLD.size - 1) / 2, 2.0]
        with pytest.raises(MismatchError, match="ranks call different collectives"):
            engine.all_reduce(tf.ones([2 + (WORLD.rank == 0)]), Reduction("sum"))
        assert engine.all_reduce(tf.ones([2], tf.float16), Reduction("sum")).numpy().tolist() == [WORLD.size] * 2
