"""What one rank's part of a step counts for."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.portions import Portion
from mpitrain.training.counting import Counted, current_share, weigh_scalars


@pytest.mark.parametrize(
    ("data", "samples"), [((np.ones((3, 2)), np.ones(3)), 3), ((np.ones((0, 2)),), 1), ((np.float32(1.0),), 1)]
)
def test_data_of_the_rank_alone(data: Any, samples: int) -> None:
    counted = Counted.of(data)
    assert (counted.samples, counted.share, counted.always) == (samples, None, True)
    with counted.keeping(list):
        assert current_share() is None


@pytest.mark.parametrize(
    ("rows", "rank", "samples", "share", "counts"),
    [
        (5, 0, 3, 0.6, True),
        (5, 1, 2, 0.4, True),
        (1, 0, 1, 1.0, True),  # of fewer rows than ranks every rank computes all
        (1, 1, 0, 0.0, False),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_share_of_a_batch(rows: int, rank: int, samples: int, share: float, counts: bool, known: bool) -> None:
    portion = Portion(rank, 2, True)

    def count(x: Any) -> Any:
        counted = Counted.of((portion.share((x, x[:, 0])),))
        assert current_share() is None
        with counted.keeping(list):
            part = tf.identity(current_share())
        return tf.convert_to_tensor(counted.samples), part, True if counted.always else counted.counts

    data = tf.ones((rows, 2))
    traced = tf.function(count, input_signature=[tf.TensorSpec((None, 2))])
    found = count(data) if known else traced(data)
    assert (int(found[0]), bool(found[2])) == (samples, counts)
    assert float(found[1]) == pytest.approx(share)


def test_metrics_get_back_what_they_had_before_a_step_that_does_not_count() -> None:
    metric = keras.metrics.Mean()
    metric.update_state(5.0)
    for rank, expected in ((1, 5.0), (0, 4.0)):
        counted = Counted.of(Portion(rank, 2, True).share((tf.ones((1, 2)),)))
        with counted.keeping(lambda: metric.variables):
            metric.update_state(3.0)
        assert float(metric.result()) == expected


def test_a_number_without_weight_counts_by_the_share() -> None:
    originals = {kind: kind.update_state for kind in (keras.metrics.Mean, keras.metrics.Sum)}
    try:
        weigh_scalars()
        mean, total = keras.metrics.Mean(), keras.metrics.Sum()
        correct, steps = keras.metrics.Sum(), keras.metrics.Sum()
        for rank, value in ((0, 1.0), (1, 6.0)):
            counted = Counted.of(Portion(rank, 2, True).share((tf.ones((5, 2)),)))
            with counted.keeping(list):
                for metric in (mean, total):
                    metric.update_state(value)
                    metric.update_state([value, value])  # an array is of samples, and counts as it is
                correct.update_state(tf.constant(int(value)))
                steps.update_state(1)
        assert float(mean.result()) == pytest.approx((0.6 * 1 + 0.4 * 6 + 2 * 1 + 2 * 6) / (0.6 + 0.4 + 4))
        assert float(total.result()) == pytest.approx(0.6 * 1 + 0.4 * 6 + 2 * 1 + 2 * 6)
        assert float(correct.result()) == 1 + 6  # whole numbers that a step has computed are counts of rows
        assert float(steps.result()) == pytest.approx(1.0)
    finally:
        for kind, update_state in originals.items():
            kind.update_state = update_state
