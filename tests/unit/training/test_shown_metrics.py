"""What a script sees when it asks metrics by itself: the result over all ranks, until their state changes."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from mpitrain.training.metric_states import observe, over_ranks
from mpitrain.training.shown_metrics import of_this_rank
from mpitrain.world.world import World
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")


class Ratio(keras.Metric):
    """Of two others, as scripts write F1 scores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.all, self.some = keras.metrics.Sum(), keras.metrics.Sum()

    def update_state(self, value: Any, whole: Any) -> None:
        self.all.update_state(whole)
        self.some.update_state(value)

    def result(self) -> Any:
        return self.some.result() / self.all.result()

    def reset_state(self) -> None:
        self.all.reset_state()
        self.some.reset_state()


def test_results_are_those_of_all_ranks_while_the_state_stays() -> None:
    def rank(world: World) -> None:
        mean, ratio = keras.metrics.Mean(), Ratio()
        observe([mean, ratio])
        for _ in range(2):
            mean.update_state([1.0] * world.rank + [4.0])  # of rank 1 two numbers
            ratio.update_state(world.rank, 2.0)
            assert float(mean.result()) == (4.0 if world.rank == 0 else 2.5)
            over_ranks([mean, ratio], dict, world)
            assert float(mean.result()) == 3.0
            assert float(ratio.result()) == 0.25 == float(ratio.some.result()) / float(ratio.all.result())
            with of_this_rank():
                assert float(mean.result()) == (4.0 if world.rank == 0 else 2.5)
            assert float(mean.count.numpy()) == world.rank + 1.0
            mean.reset_state()
            ratio.reset_state()
            assert float(mean.result()) == 0.0
        mean.update_state(7.0)
        ratio.update_state(3.0, 4.0)
        assert (float(mean.result()), float(ratio.result())) == (7.0, 0.75)

    run(2, rank)


def test_a_rank_without_data_forgets_what_was_before_a_reset() -> None:
    def rank(world: World) -> None:
        metric = keras.metrics.Sum()
        observe([metric])
        metric.update_state(5.0 * world.rank)
        over_ranks([metric], dict, world)
        assert float(metric.result()) == 5.0
        metric.reset_state()
        assert float(metric.result()) == 0.0

    run(2, rank)
