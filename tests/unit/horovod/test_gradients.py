"""Optimizers and tapes with Horovod's options give what one process makes of the gradients of all ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.horovod import optimizers, process_sets, tapes
from mpitrain.horovod.basics import Adasum, Average, Max, Sum
from mpitrain.horovod.compression import Compression
from mpitrain.horovod.gradients import LocalVariables, Options, scaled
from mpitrain.horovod.models import load_model
from mpitrain.horovod.process_sets import ProcessSet
from mpitrain.training.optimizer import hook_of
from mpitrain.world.world import World
from tests.unit.horovod.job import run

SHAPES: list[tuple[int, ...]] = [(4, 2), (3,), ()]
both_ways = pytest.mark.parametrize(
    "way", [lambda f: f, functools.partial(tf.function, autograph=False)], ids=["eager", "graph"]
)


def gradients(rank: int, step: int = 0) -> list[Any]:
    """Of any rank: rows, of which two are of one index, and dense ones."""
    random = np.random.default_rng(10 * rank + step)
    rows = tf.IndexedSlices(
        tf.constant(random.normal(size=(3, 2))), tf.constant([rank % 4, 1, 1]), tf.constant([4, 2], tf.int64)
    )
    return [rows, *(tf.constant(random.normal(size=shape)) for shape in SHAPES[1:])]


def dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient).numpy()


def variables() -> list[Any]:
    return [keras.Variable(np.ones(shape), "float64", name=f"v{i}") for i, shape in enumerate(SHAPES)]


def moved(kept: list[Any]) -> list[Any]:
    """By how much SGD with a rate of 1 has changed variables: the gradients that it was given."""
    return [1.0 - variable.numpy() for variable in kept]


def truth(size: int, average: bool) -> list[Any]:
    every = [[dense(gradient) for gradient in gradients(rank)] for rank in range(size)]
    return [np.sum(column, 0) / (size if average else 1) for column in zip(*every, strict=True)]


def check_close(found: list[Any], expected: list[Any], rtol: float = 1e-12) -> None:
    for mine, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, true, rtol=rtol, atol=rtol)


@both_ways
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"op": Sum}, {"gradient_predivide_factor": 4.0}, {"sparse_as_dense": True}, {"op": Sum, "groups": 2}],
    ids=str,
)
def test_optimizer(options: dict[str, Any], size: int, way: Callable[..., Any]) -> None:
    def rank(world: World) -> None:
        kept, made = variables(), keras.optimizers.SGD(1.0)
        made.build(kept)
        assert optimizers.KerasDistributedOptimizer(made, **options) is made
        way(lambda *own: made.apply([*own], kept))(*gradients(world.rank))
        check_close(moved(kept), truth(size, average=options.get("op") != Sum))

    run(size, rank)


@both_ways
@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("average", [True, False])
def test_steps_are_added_up_or_averaged(op: int, average: bool, way: Callable[..., Any]) -> None:
    def rank(world: World) -> None:
        kept, made = variables()[1:], keras.optimizers.SGD(1.0)
        options: dict[str, Any] = {"backward_passes_per_step": 2, "average_aggregated_gradients": average, "op": op}
        optimizers.DistributedOptimizer(made, **options)
        optimizers.DistributedOptimizer(made, **options)  # once more changes nothing
        made.build(kept)
        step = way(lambda *own: made.apply([*own], kept))
        step(*gradients(world.rank, 0)[1:])
        check_close(moved(kept), [np.zeros(shape) for shape in SHAPES[1:]])
        step(*gradients(world.rank, 1)[1:])
        factor = (0.5 if average else 1.0) / (2 if op == Average else 1)
        every = [gradients(number, number_of_step)[1:] for number in range(2) for number_of_step in range(2)]
        check_close(moved(kept), [np.sum(column, 0) * factor for column in zip(*every, strict=True)])

    run(2, rank)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("by", ["layer", "register"])
def test_local_gradients_stay_and_are_scaled(by: str, scale: bool) -> None:
    def rank(world: World) -> None:
        layer = keras.layers.Dense(2, use_bias=False, dtype="float64")
        made = keras.optimizers.SGD(1.0)
        if by == "layer":
            optimizers.PartialDistributedOptimizer(made, local_layers=layer, scale_local_gradients=scale)
        layer.build((None, 1))
        kept = [layer.kernel, keras.Variable(np.ones(3), "float64")]
        for variable in kept:
            variable.assign(np.full(variable.shape, 1.0 + world.rank * (by == "layer")))
        if by == "register":
            optimizers.DistributedOptimizer(made, scale_local_gradients=scale)
            made.register_local_var(layer.kernel)
        made.apply([tf.fill((1, 2), tf.constant(world.rank + 1.0, "float64")), tf.ones(3, "float64")], kept)
        own, common = (variable.numpy().ravel()[0] for variable in kept)
        start = 1.0 + world.rank * (by == "layer")  # with local layers ranks keep what they start from
        assert own == start - (world.rank + 1.0) / (2 if scale else 1)
        assert common == start - 1.0

    run(2, rank)


def test_partial_forms_that_know_no_layer() -> None:
    with pytest.raises(ValueError, match="local_layers must be Keras layers"):
        LocalVariables().add_layers([keras.Variable(1.0)])

    def rank(world: World) -> float:
        variable = keras.Variable(float(world.rank))
        made = optimizers.PartialDistributedOptimizer(keras.optimizers.SGD(1.0))
        made.apply([tf.constant(1.0)], [variable])
        return float(variable.numpy())

    assert run(2, rank) == [-1.0, 0.0], "each rank keeps the value that it starts from"


@both_ways
@pytest.mark.parametrize("op", [Average, Sum, Max])
def test_tape(op: int, way: Callable[..., Any]) -> None:
    def rank(world: World) -> None:
        own, common = tf.Variable(1.0), tf.Variable(1.0)
        unused = tf.Variable(1.0)

        def of(factor: Any) -> Any:
            with tf.GradientTape() as recorder:
                loss = own * factor + 2.0 * common * factor
            tape = tapes.DistributedGradientTape(recorder, op=op)
            tape.register_local_source(own)
            return tape.get_local_and_global_gradients(loss, [own, common, unused])

        def plain(factor: Any) -> Any:
            local, shared = of(factor)
            assert [source is own for source, _ in local] == [True]
            assert [gradient is None for _, gradient in shared] == [False, True]
            return local[0][1], shared[0][1]

        mine, reduced = way(plain)(tf.constant(world.rank + 1.0))
        assert float(mine) == pytest.approx((world.rank + 1.0) / 3)
        assert float(reduced) == {Average: 4.0, Sum: 12.0, Max: 6.0}[op]

    run(3, rank)


def test_a_tape_that_has_layers_of_its_own() -> None:
    def rank(world: World) -> Any:
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        with tf.GradientTape() as recorder:
            loss = tf.reduce_sum(layers[1](layers[0](tf.constant([[world.rank + 1.0]]))))
        tape = tapes.PartialDistributedGradientTape(recorder, local_layers=layers[:1], scale_local_gradients=False)
        assert tape.watched_variables() is not None, "the rest is the tape's own"
        return [float(gradient[0, 0]) for gradient in tape.gradient(loss, [layer.kernel for layer in layers])]

    assert run(2, rank) == [[1.0, 1.5], [2.0, 1.5]]


def test_compressed_gradients_travel_as_halves() -> None:
    def rank(world: World) -> Any:
        kept, made = [keras.Variable(np.zeros(2, "float32"))], keras.optimizers.SGD(1.0)
        optimizers.KerasDistributedOptimizer(made, compression=Compression.fp16)
        made.apply([tf.constant([0.1, 1000.3]) * (world.rank + 1.0)], kept)
        return kept[0].numpy()

    found = run(2, rank)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], [-0.15, -1500.45], rtol=1e-3)
    assert found[0][1] != np.float32(-1500.45)


def test_ranks_outside_of_the_set_keep_their_gradients() -> None:
    def rank(world: World) -> Any:
        pair = ProcessSet([0, 2])
        process_sets.register([pair])
        kept = [keras.Variable(float(world.rank))]
        made = optimizers.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair, op=Sum)
        made.apply([tf.constant(world.rank + 1.0)], kept)
        source = tf.Variable(1.0)
        with tapes.DistributedGradientTape(tf.GradientTape(), process_set=pair) as tape:
            loss = source * (world.rank + 1.0)
        if world.rank != 1:
            with pytest.raises(UsageError, match="distributed already, among the ranks of another process set"):
                optimizers.DistributedOptimizer(made)
        return float(kept[0].numpy()), float(tape.gradient(loss, source))

    # Ranks of a set keep what they start from, too.
    assert run(3, rank) == [(-4.0, 2.0), (-1.0, 2.0), (-2.0, 2.0)]


def test_options_given_last_hold() -> None:
    def rank(world: World) -> float:
        kept, made = [keras.Variable(0.0)], keras.optimizers.SGD(1.0)
        optimizers.DistributedOptimizer(optimizers.DistributedOptimizer(made), op=Sum)
        made.apply([tf.constant(1.0)], kept)
        return float(kept[0].numpy())

    assert run(2, rank) == [-2.0, -2.0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: optimizers.DistributedOptimizer(keras.optimizers.SGD(), op=Max), ValueError, "must be Average or Sum"),
        (lambda: optimizers.DistributedOptimizer(keras.optimizers.SGD(), op=Adasum), ValueError, "Average or Sum"),
        (lambda: optimizers.DistributedOptimizer("sgd"), UsageError, "takes a Keras 3 optimizer, not str"),
        (lambda: optimizers.DistributedOptimizer(keras.optimizers.SGD(), groups=-1), ValueError, "above 0 or a list"),
        (
            lambda: optimizers.DistributedOptimizer(keras.optimizers.SGD(), op=Sum, gradient_predivide_factor=2.0),
            ValueError,
            "for op=Average only",
        ),
        (
            lambda: optimizers.DistributedOptimizer("sgd", op=Adasum, average_aggregated_gradients=True),
            ValueError,
            "Adasum does not go with",
        ),
    ],
    ids=["max", "adasum", "text", "groups", "predivide", "aggregated"],
)
def test_what_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    def rank(world: World) -> None:
        with pytest.raises(error, match=message):
            make()

    run(1, rank)


def test_an_optimizer_in_use_cannot_begin_to_accumulate() -> None:
    def rank(world: World) -> None:
        made = keras.optimizers.SGD()
        made.build([keras.Variable(1.0)])
        with pytest.raises(UsageError, match="must be given before the optimizer is first used"):
            optimizers.DistributedOptimizer(made, backward_passes_per_step=2)
        with pytest.warns(DeprecationWarning, match="num_groups is deprecated"):
            optimizers.DistributedOptimizer(made, num_groups=1)

    run(1, rank)


def test_variables_that_are_told_too_late() -> None:
    local = LocalVariables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local.add(tf.Variable(1.0))
        local.traced = True
        local.add()
        with pytest.raises(UserWarning, match="register it before the first step"):
            local.add(tf.Variable(1.0))


def test_variables_are_known_by_keras_and_by_tensorflow() -> None:
    variable, other = keras.Variable(1.0), keras.Variable(1.0)
    local = LocalVariables()
    local.add(variable)
    assert variable in local
    assert variable.value in local
    assert other not in local
    assert other.value not in local


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_scaled(factor: float) -> None:
    rows = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    assert scaled(None, factor) is None
    assert scaled(tf.constant(2, tf.float16), factor).dtype == tf.float16
    found = scaled(rows, factor)
    assert dense(found).tolist() == [[0.0], [2.0 * factor], [0.0]]
    assert (found is rows) == (factor == 1.0)
    assert Options(predivide=4.0).op == Average


@pytest.mark.parametrize("compiled", [True, False])
def test_a_loaded_model_averages(tmp_path: Path, compiled: bool) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    if compiled:
        model.compile("sgd", "mse")
    model.save(tmp_path / "it.keras")

    def rank(world: World) -> bool:
        loaded = load_model(tmp_path / "it.keras", custom_optimizers=[keras.optimizers.SGD])
        return compiled and hook_of(loaded.optimizer) is not None

    assert run(2, rank) == [compiled] * 2
