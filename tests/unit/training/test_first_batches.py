"""Checksums of the first batches, noted as often eagerly as in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from mpitrain.faults.activity import LOOKED_AT_BATCHES, Activity
from mpitrain.training.first_batches import FirstBatches


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_first_batches_are_noted(in_graph: bool) -> None:
    activity = Activity()
    first = FirstBatches(activity)
    calls = 0

    def step(x: Any) -> Any:
        nonlocal calls
        calls += 1
        first.note((x, None, {"y": x + 1}))
        return x

    run = tf.function(step) if in_graph else step
    for number in range(LOOKED_AT_BATCHES + 3):
        run(tf.constant([float(number)]))
    assert calls == (1 if in_graph else LOOKED_AT_BATCHES + 3)
    assert len(activity.batches) == LOOKED_AT_BATCHES
    assert len(set(activity.batches)) == LOOKED_AT_BATCHES, "each is another"
    again = Activity()
    FirstBatches(again).note((tf.constant([0.0]), None, {"y": tf.constant([1.0])}))
    assert again.batches == activity.batches[:1], "the same data have the same sum"
