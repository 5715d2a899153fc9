"""Keras of a script that knows no ranks: each call is that of one process, and what was changed is noted."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.scripts.changes import Changes
from mpitrain.scripts.file_names import Names
from mpitrain.scripts.keras_patches import DryRunEnded, KerasPatches, _when
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.optimizer import hook_of
from mpitrain.world.world import World
from tests.problem import batches, mlp
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()
(X, Y), (OTHER_X, OTHER_Y) = batches(0, [12, 6])


def model(**options: Any) -> Any:
    with ONE_AT_A_TIME:
        return mlp(keras.optimizers.SGD(0.1, momentum=0.5), run_eagerly=True, **options)


def weights(own: Any) -> list[Any]:
    return [np.array(variable.numpy()) for variable in own.weights]


class Patched:
    """The patched Keras of one rank, which others do not see."""

    def __init__(self, world: World, **division: Any) -> None:
        self.changes = Changes()
        options = WorkDivision(**{"batch_is_global": True, **division})
        self.patches = KerasPatches(world, options, self.changes.note, Names(world.communicator))

    def __call__(self, name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(keras.optimizers.Optimizer if name == "apply" else keras.Model, name)
        method = "on_whole_batch" if name == "predict_on_batch" else name
        return getattr(self.patches, f"_{method}")(original, own, *args, **kwargs)

    def noted(self, part: str) -> list[str]:
        return [text for where, text in self.changes.rows if where == part]


def test_calls_of_a_script_are_those_of_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    def script(call: Any, own: Any) -> Any:
        given = [keras.callbacks.TerminateOnNaN()]
        history = call("fit", own, X, Y, 4, 2, 0, given, validation_data=(OTHER_X, OTHER_Y), shuffle=False).history
        found = [history, call("evaluate", own, OTHER_X, OTHER_Y, verbose=0, return_dict=True)]
        for rows in (6, 5):
            found.append({"batch": call("train_on_batch", own, X[:rows], Y[:rows])[0]})
            found.append({"test": call("test_on_batch", own, X[:rows], Y[:rows])[0]})
        found.append({"predicted": call("predict", own, OTHER_X, verbose=0)})
        found.append({"predicted": call("predict_on_batch", own, OTHER_X)})
        assert len(given) == 1, "the list of the script is left alone"
        return found, weights(own)

    def rank(world: World) -> Any:
        patched = Patched(world)
        found = script(patched, model())
        assert not patched.patches.training
        assert patched.patches.trained
        assert patched.patches.evaluated
        return (*found, patched)

    expected, truth = script(lambda name, own, *args, **kwargs: getattr(own, name)(*args, **kwargs), model())
    told = capfd.readouterr().err
    assert "ranks train together" not in told
    for found, own, _ in (ranks := run(2, rank)):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name in theirs:
                np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-6, err_msg=name)
        for mine, other in zip(own, truth, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-11, atol=1e-12)
    patched = ranks[0][2]
    assert patched.noted("callbacks") == [
        "TerminateOnNaN: sees the numbers of all ranks at batches too, and is called at the same batches"
    ]
    assert patched.noted("optimizer") == ["SGD: gradients are averaged over all ranks, weighted by samples"]
    assert patched.noted("data") == [
        "fit: arrays are divided by rows; batch size 4 is of all ranks",
        "validation: arrays are divided by rows",
        "evaluate: arrays are divided by rows",
        "train_on_batch: each batch is divided by rows",
        "predict: every rank predicts all samples",
    ]
    lines = [line for line in capfd.readouterr().err.splitlines() if "ranks train together" in line]
    assert lines == ["mpitrain: 2 ranks train together; fit: arrays are divided by rows; batch size 4 is of all ranks"]


@pytest.mark.parametrize(
    ("call", "arguments"), [("fit", (X, Y)), ("train_on_batch", (X, Y)), ("apply", ())], ids=lambda one: str(one)[:14]
)
def test_a_dry_run_ends_where_training_would_begin(
    call: str, arguments: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(world: World) -> None:
        patched, own = Patched(world, dry_run=True), model()
        kept, before = own, weights(own)
        own = own if arguments else keras.optimizers.SGD(1.0)
        with pytest.raises(DryRunEnded):
            patched(call, own, *(arguments or ([tf.constant(1.0)], [keras.Variable(1.0)])))
        assert patched.patches.trained
        assert not patched.patches.training
        for one, other in zip(before, weights(kept), strict=True):
            np.testing.assert_array_equal(one, other)
        begins = "" if arguments else "a loop of its own: every rank computes whole batches, as the script reads them"
        assert patched.noted("data")[0].startswith(begins or call), patched.noted("data")

    run(2, rank)
    assert "train together" not in capfd.readouterr().err


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch"])
def test_a_model_that_is_not_compiled_is_refused_by_keras(call: str) -> None:
    def plain() -> Any:
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    with pytest.raises(ValueError, match="compile") as expected:
        getattr(plain(), call)(X, Y)

    def rank(world: World) -> str:
        with pytest.raises(ValueError, match="compile") as caught:
            Patched(world)(call, plain(), X, Y)
        return str(caught.value)

    assert run(2, rank) == [str(expected.value)] * 2


def test_a_script_that_knows_ranks_is_left_alone() -> None:
    def rank(world: World) -> Any:
        patched, own = Patched(world), model()
        parallel = DataParallel(world=world)
        patched("fit", own, X[world.rank :: 2], Y[world.rank :: 2], verbose=0, callbacks=parallel)
        patched("evaluate", own, X, Y, verbose=0, callbacks=[parallel])
        assert patched.patches.trained
        assert patched.changes.rows == []

    run(2, rank)


def test_a_list_of_callbacks_is_the_script_s_own() -> None:
    """It may be given again, to a loop of the script's."""

    def rank(world: World) -> Any:
        patched, own = Patched(world), model()
        look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(round(logs["loss"], 12)))
        seen: list[float] = []
        given = keras.callbacks.CallbackList([look], add_history=True, model=own)
        before = list(given.callbacks)
        for _ in range(2):
            patched("fit", own, X, Y, verbose=0, callbacks=given)
        assert given.callbacks == before
        assert given.model is own
        return seen, own.history.epoch

    found = run(2, rank)
    assert found[0] == found[1]
    assert (len(found[0][0]), found[0][1]) == (2, [0])


@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_of_a_loop_are_averaged_once(scaled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(world: World) -> Any:
        patched, variable = Patched(world), keras.Variable(1.0)

        class SGD(keras.optimizers.SGD):
            def apply(self, *args: Any, **kwargs: Any) -> Any:
                return patched.patches._apply(keras.optimizers.SGD.apply, self, *args, **kwargs)

        class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
            def apply(self, *args: Any, **kwargs: Any) -> Any:
                return patched.patches._apply(keras.optimizers.LossScaleOptimizer.apply, self, *args, **kwargs)

        made = LossScaleOptimizer(SGD(1.0), initial_scale=1.0) if scaled else SGD(1.0)
        for _ in range(2):
            made.apply([tf.constant(world.rank + 1.0)], [variable])
        assert hook_of(made) is not None
        assert not scaled or hook_of(made.inner_optimizer) is None, "the outer one has taken the mean"
        return float(variable.numpy()), patched.noted("data"), patched.noted("optimizer")

    name = "LossScaleOptimizer" if scaled else "SGD"
    loop = ["a loop of its own: every rank computes whole batches, as the script reads them"]
    notes = [f"{name}: gradients are averaged over all ranks"]
    found = run(2, rank)
    assert [value for value, *_ in found] == [-2.0, -2.0]
    assert [rest for _, *rest in found] == [[loop, notes]] * 2
    assert capfd.readouterr().err.count("mpitrain: 2 ranks train together") == 1


@pytest.mark.parametrize(
    ("callback", "steps", "text"),
    [
        (keras.callbacks.History(), 1, " at the end of epochs"),
        (keras.callbacks.History(), 2, " at the end of epochs"),
        (keras.callbacks.TerminateOnNaN(), 1, " at batches too, and is called at the same batches"),
        (
            keras.callbacks.TerminateOnNaN(),
            2,
            " at the end of epochs, its own at batches, for steps_per_execution is above 1",
        ),
    ],
)
def test_when_callbacks_see_all_numbers(callback: Any, steps: int, text: str) -> None:
    assert _when(callback, model(steps_per_execution=steps)) == text


def test_only_rank_0_shows_progress(capfd: pytest.CaptureFixture[str]) -> None:
    def rank(world: World) -> None:
        patched, own = Patched(world), model()
        patched("fit", own, X, Y, verbose=2)
        patched("evaluate", own, X, Y, verbose=2)
        patched("predict", own, X, verbose=2)

    run(2, rank)
    lines = [line.partition(" - ")[0] for line in capfd.readouterr().out.splitlines() if " - " in line]
    assert lines == ["1/1"] * 3
