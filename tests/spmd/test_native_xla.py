"""Gradients exchanged inside of what XLA compiles: the bits of Python's way, in one program with all of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.collectives.native_engine import usable
from mpitrain.collectives.registry import engine_of
from mpitrain.errors import AgreedError, MismatchError
from mpitrain.native import operation, program
from mpitrain.reduction.graph import mean_gradients
from mpitrain.reduction.reducer import Reducer
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.optimizer import hook_of
from tests.spmd.test_native import FIRST, PLANS, SAMPLES, UPDATES, Job, compare_bits, plan_of, summed_by, values
from tests.spmd.truth import FEATURES, batches, check_history, check_same, fit, merged, mlp

WORLD = mpitrain.init()


def why_not() -> str | None:
    if WORLD.size == 1:
        return "one rank exchanges nothing"
    found = usable(WORLD)
    return found if isinstance(found, str) else program.refused(found)


REFUSED = why_not()
pytestmark = [
    pytest.mark.mpich,
    pytest.mark.ranks(2),
    pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED)),
]


class Compiled(Job):
    def __init__(self, plan: Any) -> None:
        super().__init__("native", plan, False)
        self.graph = tf.function(self.graph, jit_compile=True, autograph=False)


@pytest.mark.parametrize("added_up", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_the_bits_are_those_of_python(name: str, added_up: bool) -> None:
    plan = plan_of(name, added_up)
    native, python = Compiled(plan), Job("host", plan)
    compare_bits(native, python)
    assert native.left_to_python == FIRST + (0 if added_up else 2)  # whose sum is not exact


def test_ranks_may_go_different_ways() -> None:
    plan = plan_of("large")
    job, other = Job("host", plan) if WORLD.rank == 0 else Compiled(plan), Job("host", plan)
    with summed_by("ring:65536:4"):
        for update in range(UPDATES):
            ours, theirs = job(update, SAMPLES["unequal"]), other(update, SAMPLES["unequal"])
            for one, two in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", ["one", "small", "large"])
def test_what_is_not_finite_is_traced_to_its_rank(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(name)
    job = Compiled(plan)
    with summed_by("ring:65536:4"):
        for update in range(UPDATES):
            job(update, SAMPLES["equal"])
        assert "not finite" not in capfd.readouterr().err
        own = values(UPDATES, plan.specs)
        if WORLD.rank == 1:
            own[0] = tf.fill(own[0].shape, tf.constant(np.nan, own[0].dtype))
        job(UPDATES, SAMPLES["equal"], own)
    told = capfd.readouterr().err
    if WORLD.rank == 0:
        assert "first in v0 on rank 1" in told


def test_what_ranks_call_differently_is_told_on_all() -> None:
    one, other = Compiled(plan_of("one")), Compiled(plan_of("small"))
    for update in range(UPDATES):
        one(update, SAMPLES["equal"])
        other(update, SAMPLES["equal"])
    job = one if WORLD.rank == 0 else other
    with pytest.raises(tf.errors.UnknownError, match=r"^MismatchError: ranks call different collectives"):
        job(0, SAMPLES["equal"])
    assert isinstance(WORLD.activity.error, MismatchError)
    WORLD.activity.error = None
    np.testing.assert_array_equal(one(1, SAMPLES["equal"])[0], Job("host", plan_of("one"))(1, SAMPLES["equal"])[0])


def test_branches_and_loops_go_in_the_order_of_the_program() -> None:
    """Each rank would otherwise be free to run them in another one, or not at all where nothing needs the result."""
    plans = [plan_of("one"), plan_of("empty"), plan_of("many")]
    engine, reducer = engine_of(WORLD), Reducer(WORLD.communicator, WORLD.agreement, WORLD.all_reduce)

    def mean(number: int, factor: Any) -> Any:
        own = [tf.ones(spec.shape, spec.dtype) * tf.cast(factor, spec.dtype) for spec in plans[number].specs]
        return tf.reduce_sum(mean_gradients(engine, reducer, plans[number], own, 1.0)[-1])

    @tf.function(jit_compile=True, autograph=False)
    def step(turns: Any) -> Any:
        rank = tf.constant(float(WORLD.rank))
        mean(2, rank)
        first = tf.cond(turns > 2, lambda: mean(0, rank), lambda: mean(1, rank))
        total = tf.while_loop(lambda i, _: i < turns, lambda i, s: (i + 1, s + mean(1, rank)), (0, 0.0))[1]
        mean(0, rank)
        return first, total

    middle = (WORLD.size - 1) / 2
    for turns in (1, 3, 2, 5):
        updates = reducer.statistics.updates
        first, total = step(tf.constant(turns))
        assert reducer.statistics.updates - updates == turns + 3
        np.testing.assert_allclose(first, (3 if turns > 2 else 2) * middle)
        np.testing.assert_allclose(total, turns * 2 * middle)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "adam": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
}


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange beside a compiled program, and not in it, fails."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("an operation of a graph")

    monkeypatch.setattr(operation, "exchange", refuse)


def network(optimizer: Any, **options: Any) -> Any:
    """Of everything that a step may have: statistics, random numbers, a table, metrics."""
    keras.utils.set_random_seed(3)
    rows = keras.Input((FEATURES,), dtype="float32")
    words = keras.ops.cast(keras.ops.abs(rows * 3), "int32") % 6
    hidden = keras.layers.Dense(9, activation="gelu")(rows)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.2)(hidden)
    table = keras.layers.Flatten()(keras.layers.Embedding(6, 2)(words))
    model = keras.Model(rows, keras.layers.Dense(3)(keras.layers.Concatenate()([hidden, table])))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **{"jit_compile": True, **options})
    return model


def check_whole(model: Any) -> None:
    hook = hook_of(model.optimizer)
    assert hook is not None
    assert hook.compiled is None
    mpitrain.verify_replicas([*model.trainable_variables, *model.optimizer.variables])


@pytest.mark.usefixtures("no_kernel", "double_precision")
@pytest.mark.parametrize(
    ("name", "sizes"), [("momentum", [[4, 4, 2], [2, 5, 1]]), ("adam", [[3, 3, 2, 3], [3, 1]])], ids=str
)
def test_fit(name: str, sizes: list[list[int]]) -> None:
    everyone = [batches(rank, sizes[rank % len(sizes)]) for rank in range(WORLD.size)]
    seen: list[int] = []
    counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model, reference = (mlp(OPTIMIZERS[name](), jit_compile=True) for _ in range(2))
    history = fit(model, everyone[WORLD.rank], True, [counts])
    check_history(history, fit(reference, merged(everyone), False), 1e-9)
    check_whole(model)
    check_same(model, reference, 1e-9)
    assert seen == [*range(len(sizes[WORLD.rank]))] * 2


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("name", "options"), [("adam", {}), ("momentum", {"steps_per_execution": 2})], ids=str)
def test_replicas_of_any_model_are_identical(name: str, options: dict[str, Any]) -> None:
    """Programs for batches of other sizes, and that of a rank without data, give the same bits."""
    model = network(OPTIMIZERS[name](), **options)
    pairs = batches(WORLD.rank, [8, 8, 5, 3][: 4 - 2 * WORLD.rank], dtype="float32")
    history = fit(model, pairs, True, epochs=4)
    assert history["loss"][-1] < history["loss"][0]
    check_whole(model)


@pytest.mark.usefixtures("no_kernel")
def test_mixed_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network(keras.optimizers.SGD(0.05))
    finally:
        keras.config.set_dtype_policy("float32")
    fit(model, batches(WORLD.rank, [8, 8, 5], dtype="float32"), True)
    check_whole(model)
    assert int(model.optimizer.iterations.numpy()) == 6


@pytest.mark.usefixtures("no_kernel")
def test_a_loop_of_ones_own() -> None:
    """Two optimizers in one program, and a tape beside them."""
    rates = (0.1, 0.5)
    own = [tf.Variable([1.0 + WORLD.rank, 2.0]) for _ in rates]
    optimizers = [mpitrain.DistributedOptimizer(keras.optimizers.SGD(rate)) for rate in rates]

    @tf.function(jit_compile=True)
    def step(x: Any) -> Any:
        for variable, optimizer in zip(own, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * x)
            optimizer.apply(tape.gradient(loss, [variable]), [variable])
        with mpitrain.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(own[0] * own[0] * x)
        return tape.gradient(loss, own[0])

    for number in range(1, FIRST + 3):
        gradient = step(tf.constant([1.0, float(WORLD.rank)]))
        for variable, rate in zip(own, rates, strict=True):
            np.testing.assert_allclose(variable, [1.0 - rate * number, 2.0 - rate * number / 2], rtol=1e-5)
        np.testing.assert_allclose(gradient, [2 * own[0][0], own[0][1]], rtol=1e-5)
    mpitrain.verify_replicas(own)


def test_where_xla_cannot_the_step_is_cut(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks do it if one cannot; one tells why, where that is wanted."""
    strategy = strategy_of()
    monkeypatch.setattr(WORLD, "verbose", True)
    whole = network(keras.optimizers.SGD(0.1))
    fit(whole, batches(WORLD.rank, [4, 4], dtype="float32"), True)
    told = "mpitrain: the training step is compiled whole, with the exchange in it\n"
    assert (told in capfd.readouterr().err) == WORLD.is_root
    monkeypatch.setattr(strategy, "_not_in_xla", None)
    if WORLD.rank == 1:
        monkeypatch.setattr(program, "refused", lambda library: "it is too old")
        engine_of(WORLD).__dict__.pop("capabilities", None)
    try:
        model = network(keras.optimizers.SGD(0.1))
        fit(model, batches(WORLD.rank, [4, 4, 2], dtype="float32"), True)
        hook = hook_of(model.optimizer)
        assert hook is not None
        assert hook.compiled is not None
        told = "the training step is compiled in two parts, cut at the exchange: on rank 1 it is too old\n"
        assert (told in capfd.readouterr().err) == WORLD.is_root
        mpitrain.verify_replicas(model.trainable_variables)
        weight = tf.Variable([1.0])
        optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.1))

        @tf.function(jit_compile=True, autograph=False)
        def step() -> None:
            optimizer.apply([tf.constant([1.0])], [weight])

        with pytest.raises(AgreedError, match=r"^the tf.function step \(test_native_xla.py:\d+\) has jit_compile=True"):
            step()
    finally:
        engine_of(WORLD).__dict__.pop("capabilities", None)


def test_what_calls_python_is_not_compiled() -> None:
    class Own(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.mean((y_pred - y_true) ** 2)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), Own(reduction="sum"), jit_compile=True)
    x, y = (np.random.default_rng(WORLD.rank).normal(size=(8, size)).astype("f4") for size in (FEATURES, 1))
    parallel = DataParallel(sync_batch_norm=True, loss_is="whole")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[parallel])
    mpitrain.verify_replicas(model.trainable_variables)
