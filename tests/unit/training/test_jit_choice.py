"""All ranks keep the way that takes the slowest of them less time; tests/spmd/test_jit_choice.py has it in `fit`."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from mpitrain.strategies.strategy import Update, strategy_of
from mpitrain.training import jit_choice
from mpitrain.training.jit_choice import TIMED_STEPS, WARM_STEPS, JitChoice
from mpitrain.world.world import World
from tests.unit.job import run

# Of each rank the seconds of a step that is not compiled, and of one that is.
FASTER, SLOWER = [(1.0, 3.0), (4.0, 2.0)], [(1.0, 0.5), (2.0, 3.0)]


@pytest.mark.parametrize(
    ("seconds", "ways", "told"),
    [
        (FASTER, [True], "a step takes 4e+03 ms, compiled by XLA 3e+03 ms (0.75 times as long): it is compiled"),
        (SLOWER, [True, False], "(1.50 times as long): it is not compiled"),
        (FASTER[:1], [True, False], "(3.00 times as long): it is not compiled"),
    ],
)
def test_the_slowest_rank_counts(
    seconds: list[tuple[float, float]],
    ways: list[bool],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = threading.local()  # each rank's clock, and the ways that it was told to take

    def compile_step(model: Any, compiled: bool) -> None:
        own.ways.append((compiled, int(model.optimizer.iterations)))

    monkeypatch.setattr(jit_choice, "time", SimpleNamespace(perf_counter=lambda: own.now))
    monkeypatch.setattr(jit_choice, "compile_step", compile_step)

    def rank(world: World) -> Any:
        own.now, own.ways = 0.0, []
        optimizer, variable = SimpleNamespace(iterations=tf.Variable(0)), tf.Variable([0.0])
        choice = JitChoice(world)
        choice.set_model(SimpleNamespace(optimizer=optimizer))
        choice.on_train_begin()
        for step in range(3 * (WARM_STEPS + TIMED_STEPS)):
            choice.on_train_batch_begin(step)
            strategy_of(world).update([tf.constant([1.0])], [variable], Update("a"))
            optimizer.iterations.assign_add(1)
            warm = step % (WARM_STEPS + TIMED_STEPS) < WARM_STEPS
            own.now += 100.0 if warm else seconds[world.rank][bool(own.ways) and own.ways[-1][0]]
            choice.on_train_batch_end(step)
        return choice.is_over, own.ways

    turn = WARM_STEPS + TIMED_STEPS
    expected = [(way, turn * number) for number, way in enumerate(ways, 1)]
    assert run(len(seconds), rank) == [(True, expected)] * len(seconds)
    err = capfd.readouterr().err
    assert told in err
    assert err.count("mpitrain: ") == 1
