"""What is known of the latest step of a model."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from mpitrain.strategies.strategy import Update, strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.latest_step import LatestStep
from mpitrain.world.world import World
from tests.unit.job import run


def test_samples_of_a_training_step_are_those_of_its_exchange() -> None:
    def rank(world: World) -> list[float]:
        latest, variable = LatestStep(strategy_of(world)), tf.Variable([0.0])
        found = [latest.samples]  # nothing was exchanged
        with sample_count(3 + world.rank):
            strategy_of(world).update([tf.constant([1.0])], [variable], Update("a"))
        found.append(latest.samples)
        latest.note_training(7, accumulates=True)
        return [*found, latest.samples]

    assert run(2, rank) == [[1.0, 3.0, 7.0], [1.0, 4.0, 7.0]]


def test_an_evaluation_counts_batches_and_rows_whenever_a_graph_runs() -> None:
    def rank(world: World) -> Any:
        latest = LatestStep(strategy_of(world))
        note = tf.function(latest.note_test)
        note(tf.constant(9))
        assert latest.batches == 0  # no evaluation is under way
        latest.begin_test()
        counts = [latest.batches]
        for rows in (4, 4, 2):
            note(tf.constant(rows))
            counts.append(latest.batches)
        samples = latest.samples
        latest.end_test()
        return counts, samples, latest.batches, latest.samples

    assert run(1, rank) == [([0, 1, 2, 3], 2.0, 0, 1.0)]


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ({"loss": 0.5}, False),
        ({"loss": tf.constant(0.5)}, False),
        ({"pair": tf.constant([1.0, 2.0])}, False),
        ({"loss": 0.5, "rows": tf.zeros([4])}, True),
        ({"more": {"rows": tf.zeros([4, 2])}}, True),
    ],
)
def test_arrays_with_a_number_for_each_sample_are_seen(logs: Any, expected: bool) -> None:
    def rank(world: World) -> bool:
        latest = LatestStep(strategy_of(world))
        latest.note_logs(logs, (tf.zeros([4, 3]), tf.zeros([4])))
        return latest.has_rows

    assert run(1, rank) == [expected]
