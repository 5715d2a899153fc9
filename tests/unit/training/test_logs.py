"""Numbers that Keras reports, over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import AgreedError, MismatchError
from mpitrain.training.logs import Leaves, Logs, combined, epoch_logs, global_metrics, leaves_of, nested
from mpitrain.training.shown_metrics import of_this_rank
from mpitrain.world.world import World
from tests.unit.job import run

LOGS = {
    "loss": tf.constant(2.0),
    "parts": {"one": 1, "two": np.float32(0.5)},
    "several": [tf.constant([1.0, 2.0]), (3, "text")],
    "half": tf.constant([1.5, 2.5], tf.bfloat16),
}


def test_leaves_are_found_and_put_back() -> None:
    leaves = leaves_of(LOGS)
    assert {path: value for path, value in leaves.items() if not isinstance(value, np.ndarray)} == {
        ("loss",): 2.0,
        ("one",): 1.0,
        ("two",): 0.5,
        ("several", 1, 0): 3,
        ("several", 1, 1): "text",
    }
    assert leaves["several", 0].tolist() == [1.0, 2.0]
    assert (leaves["half",].tolist(), leaves["half",].dtype) == ([1.5, 2.5], np.float32)
    back = nested({path: leaves[path] for path in sorted(leaves, key=str)})
    assert (back["loss"], back["one"], back["several"][1]) == (2.0, 1.0, [3, "text"])
    assert leaves_of(None) == {}


def told(rank: int) -> dict[str, Any]:
    """Of three ranks; the last has no samples."""
    own = {"same": 0.1, "number": float(rank), "array": np.array([rank, 1.0]), "text": f"of {rank}"}
    return own | ({"only here": 4.0} if rank == 1 else {})


SAMPLES = [1.0, 3.0, 0.0]
EXPECTED = {"same": 0.1, "number": 0.75, "text": "of 0", "only here": 4.0}


def test_means_are_weighted_by_samples() -> None:
    found = run(3, lambda world: epoch_logs(told(world.rank), SAMPLES[world.rank], world))
    for own in found:
        assert own.pop("array").tolist() == [0.75, 1.0]
        assert own == EXPECTED
    unweighted = run(3, lambda world: epoch_logs({"number": world.rank * 1.0}, 0.0, world))
    assert unweighted == [{"number": 1.0}] * 3


@pytest.mark.parametrize("shapes", [[(2,), (3,)], [(2,), (2,)]], ids=["other shapes", "a row for each sample"])
def test_rows_of_samples_are_no_number(shapes: list[tuple[int]]) -> None:
    def rank(world: World) -> str:
        own: Leaves = {("per_row",): np.full(shapes[world.rank], world.rank * 1.0)}
        with pytest.raises(AgreedError) as caught:
            combined(own, 2.0, world, has_rows=True)
        return str(caught.value)

    texts = run(2, rank)
    assert texts == texts[:1] * 2
    assert "an array 'per_row' of shape (2,)" in texts[0]
    if shapes[0] == shapes[1]:  # where nothing says so, it is an array of numbers
        found = run(2, lambda world: combined({("a",): np.full(2, world.rank * 1.0)}, 2.0, world))
        assert [own["a",].tolist() for own in found] == [[0.5, 0.5]] * 2


def accuracy(rank: int) -> Any:
    metric = keras.metrics.BinaryAccuracy(name="accuracy")
    rows = rank + 1
    metric.update_state(np.ones(rows), np.arange(rows) % 2)
    return metric


def test_a_result_of_a_metric_is_that_of_all_samples() -> None:
    """By whatever name; what is left is averaged over samples."""

    def rank(world: World) -> Any:
        metric = accuracy(world.rank)
        logs = Logs(lambda: [metric], lambda: {"accuracy": metric.result()}, world)
        own = leaves_of({"hits": metric.result(), "loss": float(world.rank), "more": np.array([world.rank, 0])})
        world.agreement.call(logs.call(own))
        found = logs.reduce(list(own), own, world.rank + 1.0)
        with of_this_rank():
            return found, float(metric.result())

    for number, (found, own) in enumerate(run(3, rank)):
        hits = [0, 1, 1]  # of 1, 2 and 3 samples
        assert own == pytest.approx(hits[number] / (number + 1))
        assert found["hits"] == pytest.approx(sum(hits) / 6)
        assert found["loss"] == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
        assert found["more"] == pytest.approx([8 / 6, 0.0])


def test_ranks_with_other_metrics_are_told() -> None:
    def rank(world: World) -> None:
        metric = keras.metrics.Mean() if world.rank else accuracy(0)
        with pytest.raises(MismatchError, match="metrics of 2 variables"):
            global_metrics([metric], lambda: {"found": metric.result()}, world)

    run(2, rank)
