"""Keras `fit` on N ranks is Keras `fit` on one rank with the batches of all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.errors import ReplicaError, UsageError
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.callbacks import DataParallel
from tests.spmd.truth import FEATURES, WORLD, batches, check_history, check_same, dataset, fit, merged, mlp

RANKS = range(WORLD.size)
pytestmark = pytest.mark.usefixtures("double_precision")
several = pytest.mark.skipif(WORLD.size == 1, reason="there is nobody to differ from")
few_ranks = pytest.mark.ranks(1, 2)


def train_both(
    maker: Any, sizes: list[list[int]], tolerance: float = 1e-12, dtype: str = "float64", **options: Any
) -> Any:
    """Train on `sizes[rank]` and, locally, on all ranks' batches; compare; the distributed model."""
    everyone = [batches(rank, sizes[rank % len(sizes)], dtype=dtype) for rank in RANKS]
    model, reference = maker(), maker()
    history = fit(model, everyone[WORLD.rank], True, **options)
    expected = fit(reference, merged(everyone), False, **options)
    check_same(model, reference, tolerance)
    check_history(history, expected, max(tolerance, 1e-9))
    return model


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sgd", "global_clipnorm") else pytest.param(name, marks=pytest.mark.ranks(2))
        for name in OPTIMIZERS
    ],
)
def test_optimizers(name: str) -> None:
    # Adam divides by roots of squared gradients, which magnifies the last bits.
    train_both(lambda: mlp(OPTIMIZERS[name]()), [[4, 4, 4]], 1e-9 if name == "weight decay" else 1e-12)


@few_ranks
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": True}],
    ids=lambda options: next(iter(options)),
)
def test_ways_to_run_a_step(options: dict[str, Any]) -> None:
    sgd = OPTIMIZERS["clipnorm"]
    model = train_both(lambda: mlp(sgd(), **options), [[4, 4, 4, 4]])
    assert int(model.optimizer.iterations.numpy()) == 8


@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        pytest.param([[4, 4, 2], [2, 5, 1]], {}, marks=pytest.mark.mpich),
        pytest.param([[4, 4, 2], [2, 5, 1]], {"jit_compile": True}, marks=pytest.mark.ranks(2)),
        pytest.param([[3, 3, 3, 3], [3, 3]], {}, marks=pytest.mark.mpich),
        pytest.param([[3], [2, 4, 1]], {"run_eagerly": True}, marks=pytest.mark.ranks(2)),
        pytest.param([[3], [2, 4, 1]], {"jit_compile": True}, marks=pytest.mark.ranks(2)),
        pytest.param([[3, 3, 2], [2]], {"steps_per_execution": 2}, marks=pytest.mark.ranks(2)),
    ],
    ids=str,
)
def test_other_batch_sizes_and_out_of_data(sizes: list[list[int]], way: dict[str, Any]) -> None:
    train_both(lambda: mlp(OPTIMIZERS["sgd"](), **way), sizes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes(dtype: str) -> None:
    tolerance = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}[dtype]
    keras.config.set_floatx("float32")
    everyone = [batches(rank, [4, 4], dtype="float32") for rank in RANKS]
    model, reference = (mlp(keras.optimizers.SGD(0.1), dtype=dtype) for _ in range(2))
    assert model.trainable_variables[0].dtype == dtype
    history = fit(model, everyone[WORLD.rank], True)
    check_history(history, fit(reference, merged(everyone), False), tolerance)
    mpitrain.verify_replicas(model.variables)
    for own, expected in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(own.numpy().astype("f8"), expected.numpy().astype("f8"), atol=tolerance)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["dense", "embedding"])
@pytest.mark.parametrize("sizes", [[[4] * 4], [[4] * 5], [[4, 2, 4, 1], [2, 3, 1, 1]]], ids=str)
def test_accumulation_exchanges_once_an_update(sizes: list[list[int]], kind: str) -> None:
    everyone = [batches(rank, sizes[rank % len(sizes)]) for rank in RANKS]
    # The truth: one step over the two micro-batches together, weighted by samples.
    together = [merged(everyone)[i : i + 2] for i in range(0, 4, 2)]
    pairs = [tuple(np.concatenate([p[part] for p in two]) for part in (0, 1)) for two in together]
    updates = strategy_of(WORLD).statistics.updates
    maker: Any = mlp if kind == "dense" else embedding
    change: Any = (lambda pair: pair) if kind == "dense" else to_words
    # Keras itself clips the rows of a sparse gradient before it merges those of equal index.
    clip: Any = {"clipnorm": 0.05} if kind == "dense" else {}
    model = maker(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, **clip))
    reference = maker(keras.optimizers.SGD(0.1, **clip))
    fit(model, [change(p) for p in everyone[WORLD.rank]], True, epochs=1)
    fit(reference, [change(p) for p in pairs], False, epochs=1)
    if WORLD.size > 1:
        assert strategy_of(WORLD).statistics.updates - updates == 2
        check_same(model, reference)


@several
@pytest.mark.parametrize("sizes", [[[2] * 6, [2] * 3], [[2], [2] * 4]], ids=str)
def test_accumulation_where_ranks_run_out_of_data(sizes: list[list[int]]) -> None:
    everyone = [batches(rank, sizes[rank % len(sizes)]) for rank in RANKS]
    model = mlp(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    reference = mlp(keras.optimizers.SGD(0.1))
    fit(model, everyone[WORLD.rank], True, epochs=1)
    whole = merged(everyone)
    pairs = [
        tuple(np.concatenate([p[part] for p in whole[i : i + 2]]) for part in (0, 1)) for i in range(0, len(whole), 2)
    ]
    fit(reference, pairs, False, epochs=1)  # type: ignore[arg-type]
    check_same(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before_compile", [False, True])
def test_mixed_float16_skips_the_same_steps(before_compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What overflows is no fault: the loss is scaled until it does.
    monkeypatch.setattr(strategy_of(WORLD).finite, "action", "stop")
    keras.config.set_floatx("float32")
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(policy)
    try:
        optimizer = keras.optimizers.SGD(0.1)
        if before_compile:  # the inner one, before Keras wraps it
            optimizer = mpitrain.DistributedOptimizer(optimizer)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3, dtype=policy)])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), auto_scale_loss=True)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        own = batches(WORLD.rank, [4, 4, 4, 4], dtype="float32")
        if WORLD.rank == WORLD.size - 1:
            own[1] = (np.full_like(own[1][0], 6e4), own[1][1])
        fit(model, own, True, epochs=1)
    finally:
        keras.config.set_dtype_policy("float32")
    mpitrain.verify_replicas([*model.variables, *model.optimizer.variables])
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14
    assert int(model.optimizer.inner_optimizer.iterations.numpy()) == 3
    assert np.isfinite(model.get_weights()[0]).all()


@several
def test_the_optimizer_inside_a_loss_scale_optimizer_is_refused() -> None:
    inner = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.1))
    outer = keras.optimizers.LossScaleOptimizer(inner)
    variable = keras.Variable([1.0])
    with pytest.raises(UsageError, match="inside a LossScaleOptimizer"):
        outer.apply([tf.constant([1.0])], [variable])


class Branched(keras.Model):
    """Has a layer that is never used, and so has no gradient."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.used = keras.layers.Dense(3, dtype="float64")
        self.unused = keras.layers.Dense(2, dtype="float64")

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, x: Any) -> Any:
        return self.used(x)


class OwnStep(Branched):
    """Overrides the training step."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.used.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"own": loss}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Branched, OwnStep])
@pytest.mark.parametrize("frozen", [False, True])
def test_none_gradients_own_steps_and_frozen_layers(kind: Any, frozen: bool) -> None:
    def maker() -> Any:
        keras.utils.set_random_seed(5)
        model = kind()
        model.build((None, FEATURES))
        if frozen:
            model.unused.trainable = False
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    everyone = [batches(rank, [4, 4]) for rank in RANKS]
    model, reference = maker(), maker()
    history = fit(model, everyone[WORLD.rank], True)
    fit(reference, merged(everyone), False)
    check_same(model, reference)
    assert mpitrain.all_gather_obj(str(history)) == [str(history)] * WORLD.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("jit", [False, True])
def test_lazily_built_models_start_alike(jit: bool) -> None:
    def maker(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [keras.layers.Dense(4, activation="relu", dtype="float64"), keras.layers.Dense(3, dtype="float64")]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit)
        return model

    everyone = [batches(rank, [4, 4, 4]) for rank in RANKS]
    model = maker(11 + WORLD.rank)
    fit(model, everyone[WORLD.rank], True)
    reference = maker(11)
    fit(reference, merged(everyone), False)
    check_same(model, reference)


def to_words(pair: Any) -> Any:
    """Few words, so that each batch has rows more than once."""
    return np.abs(pair[0] * 2).astype(np.int64) % 6, pair[1]


def embedding(optimizer: Any, words: int = 6, jit_compile: bool = False) -> Any:
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int64"),
            keras.layers.Embedding(words, 2, dtype="float64"),
            keras.layers.Flatten(dtype="float64"),
            keras.layers.Dense(3, dtype="float64"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


@pytest.mark.parametrize(
    ("words", "sizes", "way"),
    [
        pytest.param(6, [[4, 4]], {}, marks=pytest.mark.ranks(2)),
        pytest.param(5000, [[4, 4]], {"jit_compile": True}, marks=pytest.mark.ranks(2)),
        (5000, [[4, 2], [3]], {}),
        (6, [[4, 2], [3]], {}),
    ],
    ids=str,
)
def test_embeddings(words: int, sizes: list[list[int]], way: dict[str, Any]) -> None:
    everyone = [[to_words(p) for p in batches(rank, sizes[rank % len(sizes)])] for rank in RANKS]
    model, reference = (embedding(keras.optimizers.SGD(0.3), words, **way) for _ in range(2))
    fit(model, everyone[WORLD.rank], True)
    fit(reference, merged(everyone), False)
    check_same(model, reference)


@few_ranks
def test_validation_and_evaluate() -> None:
    everyone = [batches(rank, [4, 4]) for rank in RANKS]
    held_out = [batches(rank, [5 + rank] * (1 + rank), seed=99) for rank in RANKS]
    flat = [pair for own in held_out for pair in own]
    more = keras.metrics.SparseCategoricalCrossentropy
    model, reference = (mlp(OPTIMIZERS["sgd"](), metrics=[more(from_logits=True)]) for _ in range(2))
    history = fit(model, everyone[WORLD.rank], True, validation_data=dataset(held_out[WORLD.rank]))
    expected = fit(reference, merged(everyone), False, validation_data=dataset(flat))
    check_history(history, expected, 1e-9)
    own = model.evaluate(dataset(held_out[WORLD.rank]), verbose=0, return_dict=True, callbacks=[DataParallel()])
    truth = reference.evaluate(dataset(flat), verbose=0, return_dict=True)
    check_history({k: [v] for k, v in own.items()}, {k: [v] for k, v in truth.items()}, 1e-9)
    alone = model.evaluate(dataset(flat), verbose=0, return_dict=True)  # without the callback: no communication
    assert alone == pytest.approx(truth)


def test_ranks_without_validation_data_have_the_same_numbers() -> None:
    everyone = [batches(rank, [4, 4]) for rank in RANKS]
    held_out = batches(0, [5, 3], seed=99)
    nothing = [tuple(part[:0] for part in held_out[0])]
    model, reference = (mlp(OPTIMIZERS["sgd"]()) for _ in range(2))
    history = fit(model, everyone[WORLD.rank], True, validation_data=dataset(nothing if WORLD.rank else held_out))
    check_history(history, fit(reference, merged(everyone), False, validation_data=dataset(held_out)), 1e-9)


@few_ranks
def test_batch_normalization_moments_are_averaged() -> None:
    def maker() -> Any:
        keras.utils.set_random_seed(2)
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.BatchNormalization(momentum=0.5, dtype="float64"),
            keras.layers.Dense(3, dtype="float64"),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    everyone = [batches(rank, [4, 4]) for rank in RANKS]
    models = [maker() for _ in RANKS]
    for rank in RANKS:
        fit(models[rank], everyone[rank], False, epochs=1)
    model = maker()
    fit(model, everyone[WORLD.rank], True, epochs=1)
    mpitrain.verify_replicas(model.variables)
    for variable, *others in zip(model.variables, *[m.variables for m in models], strict=True):
        if "moving" in variable.path:
            np.testing.assert_allclose(variable, np.mean([o.numpy() for o in others], axis=0), rtol=1e-12)


@few_ranks
def test_early_stopping_decides_alike() -> None:
    everyone = [batches(rank, [4]) for rank in RANKS]
    # Validation data differ so much that ranks on their own would stop at different epochs.
    held_out = batches(WORLD.rank, [6], seed=50)
    model = mlp(keras.optimizers.SGD(1.0))
    stopping = keras.callbacks.EarlyStopping(patience=0)
    history = fit(model, everyone[WORLD.rank], True, [stopping], epochs=8, validation_data=dataset(held_out))
    assert len(set(mpitrain.all_gather_obj(len(history["loss"])))) == 1
    mpitrain.verify_replicas(model.variables)


class StopAtStep(keras.callbacks.Callback):
    """One rank decides to stop, in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = WORLD.rank == WORLD.size - 1 and batch == 1


def test_a_rank_that_stops_stops_all() -> None:
    model = mlp(keras.optimizers.SGD(0.1))
    history = fit(model, batches(WORLD.rank, [4] * 4), True, [StopAtStep()], epochs=5)
    assert len(history["loss"]) == 1
    mpitrain.verify_replicas(model.variables)


@pytest.mark.ranks(2)
def test_saved_model_loads_without_mpitrain(tmp_path: Path) -> None:
    model = mlp(keras.optimizers.Adam(0.1))
    fit(model, batches(WORLD.rank, [4]), True)
    model.save(tmp_path / "model.keras")
    code = (
        "import sys, keras; m = keras.saving.load_model(sys.argv[1]); assert 'mpitrain' not in sys.modules;"
        "print(type(m.optimizer).__name__, int(m.optimizer.iterations.numpy()), float(m.get_weights()[0].sum()))"
    )
    if WORLD.rank == 0:
        ran = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "model.keras")], capture_output=True, text=True, check=False
        )
        assert ran.stdout.split()[:2] == ["Adam", str(int(model.optimizer.iterations.numpy()))], ran.stderr
        assert float(ran.stdout.split()[2]) == pytest.approx(float(model.get_weights()[0].sum()))


@pytest.mark.ranks(2)
def test_a_built_optimizer_keeps_its_state() -> None:
    model = mlp(keras.optimizers.Adam(0.1))
    own = batches(0, [4, 4])
    fit(model, own, False)
    optimizer = mpitrain.DistributedOptimizer(model.optimizer)
    assert optimizer is model.optimizer
    assert mpitrain.DistributedOptimizer(optimizer) is optimizer
    before = int(optimizer.iterations.numpy())
    assert before >= 4
    fit(model, own, True)
    assert int(optimizer.iterations.numpy()) == 2 * before


@pytest.mark.ranks(2)
def test_compiling_again() -> None:
    everyone = [batches(rank, [4, 2]) for rank in RANKS]
    model, reference = mlp(keras.optimizers.SGD(0.1)), mlp(keras.optimizers.SGD(0.1))
    for jit in (True, False):
        for own, pairs, distributed in ((model, everyone[WORLD.rank], True), (reference, merged(everyone), False)):
            own.compile(keras.optimizers.SGD(0.2), own.loss, jit_compile=jit)
            fit(own, pairs, distributed)
    check_same(model, reference)


@pytest.mark.ranks(2)
def test_models_with_equal_names() -> None:
    """Two optimizers whose variables have the same names, updated in turn, with ranks out of data."""
    everyone = [batches(rank, [4, 4][: 1 + (rank == 0)]) for rank in RANKS]
    rates = (0.1, 0.3)
    start = mlp(keras.optimizers.SGD(0.1))
    clones = [keras.models.clone_model(start) for _ in rates]
    assert [v.path for v in clones[0].variables] == [v.path for v in clones[1].variables]
    for clone, rate in zip(clones, rates, strict=True):
        clone.compile(keras.optimizers.SGD(rate), start.loss)
        clone.set_weights(start.get_weights())
    for clone in [*clones, *clones]:
        fit(clone, everyone[WORLD.rank], True)
    for clone, rate in zip(clones, rates, strict=True):
        reference = mlp(keras.optimizers.SGD(rate))
        fit(reference, merged(everyone), False, epochs=4)
        check_same(clone, reference)


@pytest.mark.ranks(2)
def test_runs_repeat_to_the_bit() -> None:
    def run() -> list[Any]:
        model = mlp(keras.optimizers.Adam(0.05))
        fit(model, batches(WORLD.rank, [4, 3 + WORLD.rank]), True)
        return [v.numpy().tobytes() for v in model.variables]

    assert run() == run()


@several
def test_replicas_that_part_are_found() -> None:
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if WORLD.rank == 1 and batch == 1:
                weight = self.model.trainable_variables[1]
                weight.assign_add(np.ones(weight.shape))

    model = mlp(keras.optimizers.SGD(0.1))
    with pytest.raises(ReplicaError, match=r"after epoch 1.*bias.*rank 1 "):
        fit(model, batches(WORLD.rank, [4, 4]), True, [Meddle()])
