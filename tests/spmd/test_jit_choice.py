"""Whether XLA compiles the step is found out by all ranks together, and the training is that of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest

import mpitrain
from mpitrain.training import jit_choice
from mpitrain.training.jit_choice import WARM_STEPS, JitChoice
from tests.spmd.truth import batches, check_same, fit, merged, mlp

WORLD = mpitrain.init()


@pytest.mark.mpich
@pytest.mark.parametrize("gain", [0.5, 2.0], ids=["slower", "faster"])
def test_the_faster_way_of_the_slowest_rank_is_kept(
    gain: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own: list[Any] = []
    now = 0.0

    def clock() -> float:
        # Asked before and after each step. On the last rank steps take longest, and there is the gain.
        nonlocal now
        is_last = WORLD.rank == WORLD.size - 1
        now += (8.0 if is_last else 1.0) / (gain if is_last and own and own[0]._is_compiled else 1.0)
        return now

    monkeypatch.setattr(jit_choice, "time", SimpleNamespace(perf_counter=clock))
    # In the second epoch all but the last rank have fewer batches, so that the choice has to wait for the third.
    sizes = [[4] * (20 if rank == WORLD.size - 1 else 14) for rank in range(WORLD.size)]
    all_batches = [batches(rank, sizes[rank]) for rank in range(WORLD.size)]
    model, reference = mlp(keras.optimizers.SGD(0.05)), mlp(keras.optimizers.SGD(0.05))
    own.append(JitChoice())
    fit(model, all_batches[WORLD.rank], distributed=True, callbacks=own, epochs=4)
    fit(reference, merged(all_batches), distributed=False, epochs=4)
    assert own[0].is_over
    assert mpitrain.all_gather_obj(own[0]._is_compiled) == [gain > 1] * WORLD.size
    check_same(model, reference, tolerance=1e-7)  # XLA has a tanh of its own
    told = [line for line in capfd.readouterr().err.splitlines() if "compiled by XLA" in line]
    verdict = "it is compiled from now on" if gain > 1 else "it is not compiled from now on"
    ratio = f"8e+03 ms, compiled by XLA {8e3 / gain:.3g} ms ({1 / gain:.2f} times as long): {verdict}"
    assert told == ([f"mpitrain: a step takes {ratio}"] if WORLD.is_root else [])


def test_a_short_training_ends_without_a_choice() -> None:
    model, choice = mlp(keras.optimizers.SGD(0.05)), JitChoice()
    fit(model, batches(WORLD.rank, [4] * (WARM_STEPS + 2)), distributed=True, callbacks=[choice], epochs=1)
    assert not choice.is_over
