"""The figures of a training step, and how long it is measured."""

from __future__ import annotations

import pytest

from mpitrain.bench import step
from mpitrain.world.world import World
from tests.unit.job import run


def test_figures_are_medians_and_their_ratios() -> None:
    raw = {
        "alone_seconds": (0.010, 0.010, 0.5),
        "together_seconds": (0.012,),
        "exchanged_seconds": (0.020, 0.016, 0.9),
        "exchange_seconds": (0.003,),
        "waiting_seconds": (0.001,),
        "peer_seconds": (0.040,),
    }
    assert step._figures(raw, ["peer"]) == pytest.approx(
        {
            "alone ms": 10.0,
            "together ms": 12.0,
            "exchanged ms": 20.0,
            "overhead ms": 10.0,
            "efficiency": 0.5,
            "exchange ms": 3.0,
            "waiting ms": 1.0,
            "exposed ms": 8.0,
            "peer ms": 40.0,
            "peer overhead ms": 30.0,
            "peer / exchanged": 2.0,
        }
    )


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 2), (1e9, 200)])
def test_ranks_make_as_many_steps(seconds: float, steps: int) -> None:
    def rank(world: World) -> int:
        return step._steps_of_block(world, lambda: 0.0, seconds)

    assert run(2, rank) == [steps, steps]


def test_one_rank_without_machine_code_has_one_way() -> None:
    assert run(1, step._without_machine_code) == [{}]
