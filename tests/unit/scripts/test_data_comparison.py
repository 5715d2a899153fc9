"""What ranks hand to Keras is compared: the same data pass, other data, or another order, are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import AgreedError
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.scripts.data_comparison import DataComparison, summary
from mpitrain.world.world import world_of
from tests import simulated
from tests.simulated import SimulatedCommunicator

RNG = np.random.default_rng(5)
PICTURES = RNG.normal(size=(3000, 8, 8)).astype(np.float32)
LABELS = RNG.integers(0, 5, 3000)
ORDER = np.random.default_rng(6).permutation(3000)
TEXTS = np.array([f"text {number % 7}" for number in range(3000)])


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (PICTURES, PICTURES.copy(), True),
        (PICTURES, PICTURES * (1 + 1e-6), True),  # another processor
        (PICTURES, PICTURES[ORDER], False),
        (PICTURES, PICTURES[:2999], False),
        (LABELS, LABELS[ORDER], False),
        (LABELS, (LABELS + 1) % 5, False),
        (LABELS.astype(bool), ~LABELS.astype(bool), False),
        (TEXTS, TEXTS.copy(), True),
        (TEXTS, TEXTS[ORDER], False),
        (TEXTS.astype(object), TEXTS.astype(object)[ORDER], False),
        (np.array([np.nan, 1.0, np.inf]), np.array([np.nan, 1.0, np.inf]), True),
        (tf.constant(PICTURES), tf.constant(PICTURES[ORDER]), False),
        (tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1, 2], [3]]), True),
        (np.zeros((0, 3)), np.zeros((0, 3)), True),
        (np.array(["2020-01-01"], "datetime64[D]"), np.array(["2021-01-01"], "datetime64[D]"), False),
        (32, 32, True),
        (32, 64, False),
        (None, 1, False),
        (object(), object(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_summaries(one: Any, other: Any, alike: bool) -> None:
    assert summary(one).is_like(summary(other)) == alike
    assert summary(other).is_like(summary(one)) == alike


def on_ranks(size: int, action: Callable[[DataComparison, int], Any]) -> list[Any]:
    """What each rank returns, or the text of its AgreedError; with the notes it was told."""

    def body(communicator: SimulatedCommunicator) -> Any:
        place = topology(communicator.rank, range(size), [f"host{rank}" for rank in range(size)])
        notes: list[str] = []
        world = world_of(communicator, place, DevicePlan(), ThreadPlan(1, 1))
        try:
            return action(DataComparison(world, lambda part, text: notes.append(text)), communicator.rank), notes
        except AgreedError as error:
            return str(error), notes

    return simulated.run(size, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_same_arguments_pass(size: int) -> None:
    given = {
        "x": {"a": PICTURES, "b": LABELS},
        "y": [LABELS, TEXTS],
        "epochs": 3,
        "validation_data": (PICTURES, LABELS),
    }
    assert on_ranks(size, lambda handed, rank: handed.check("fit", given)) == [(None, [])] * size


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("y", lambda rank: (LABELS + rank) % 5),
        ("y", lambda rank: LABELS[rank:]),  # a share of the script's own
        ("x", lambda rank: PICTURES[np.random.default_rng(rank).permutation(3000)]),
        ("x", lambda rank: {"a": PICTURES, "b": LABELS[:: 1 if rank < 2 else -1]}),
        ("x", lambda rank: [[float(rank), 1.0]] * 60),
        ("x", lambda rank: tf.data.Dataset.range(9).batch(2).shard(3, rank).take(3 - rank)),
        ("epochs", lambda rank: 2 + rank),
        ("class_weight", lambda rank: {0: 1.0, 1: 2.0 * rank}),
    ],
)
def test_what_differs_is_named(name: str, ours: Callable[[int], Any]) -> None:
    def action(handed: DataComparison, rank: int) -> None:
        handed.check("fit", {"x": PICTURES, "y": LABELS, "shuffle": True, name: ours(rank)})

    texts = [text for text, _ in on_ranks(3, action)]
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"fit: {name} is not the same on rank"), texts[0]
    assert "2 (host" in texts[0]
    assert "as on rank 0. All ranks must come to the same data" in texts[0]


def batches(order: Any, change: float = 0.0) -> tf.data.Dataset:
    pictures = tf.data.Dataset.from_tensor_slices((PICTURES[order], LABELS[order])).batch(50)
    return pictures.map(lambda x, y: (x + change, y))


class Table(keras.utils.PyDataset):
    """Batches in a given order."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order = order

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        rows = self.order[50 * index : 50 * index + 50]
        return PICTURES[rows], LABELS[rows]


def generated(order: Any) -> Iterator[Any]:
    for start in range(0, 500, 50):
        yield PICTURES[order[start : start + 50]], LABELS[order[start : start + 50]]


SAME = np.arange(3000)


@pytest.mark.parametrize("make", [batches, Table, generated], ids=lambda make: make.__name__)
def test_batches_that_are_read(make: Callable[[Any], Any]) -> None:
    def action(handed: DataComparison, rank: int, order: Any) -> int:
        data = handed.watch("fit", make(order))
        handed.settle()  # as after the first step, where validation data have not been read
        rows = [len(batch[1]) for batch in (data if not isinstance(data, Table) else [data[0], data[1]])]
        handed.settle("fit")
        handed.settle()
        return sum(rows)

    whole = {"batches": 3000, "Table": 100, "generated": 500}[make.__name__]
    found = on_ranks(3, lambda handed, rank: action(handed, rank, SAME))
    assert found == [(whole, [])] * 3
    found = on_ranks(3, lambda handed, rank: action(handed, rank, ORDER if rank == 1 else SAME))
    assert [text.startswith("fit: y is not the same on rank 1 (host1) as on rank 0") for text, _ in found] == [True] * 3


def test_what_augmentation_changes_is_told_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def action(handed: DataComparison, rank: int) -> str:
        for _ in handed.watch("fit", batches(SAME, float(rank))):
            pass
        handed.settle()
        handed.note_batch("a loop of its own", (PICTURES[:5] + rank, LABELS[:5]))
        return "gone on"

    found = on_ranks(2, action)
    expected = "fit: x is not the same on rank 1 (host1) as on rank 0 of the same batch, as with random augmentation"
    assert all(result == "gone on" and expected in notes for result, notes in found)
    assert capsys.readouterr().err.count("mpitrain: warning: fit: x is not the same") == 1


def test_calls_at_each_step_are_compared_now_and_then() -> None:
    def action(handed: DataComparison, rank: int) -> int:
        for call in range(99):
            handed.check_often("train_on_batch", {"x": PICTURES[:4] + (rank if call > 2 else 0)})
        handed.check_often("train_on_batch", {"x": PICTURES[:4] + rank})
        return 100

    assert [text[:39] for text, _ in on_ranks(2, action)] == ["train_on_batch: x is not the same on ra"] * 2


def test_what_is_looked_at_draws_nothing_of_the_script() -> None:
    class Augmented(Table):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + np.random.normal(), y  # noqa: NPY002 (as scripts draw)

    np.random.seed(7)  # noqa: NPY002
    expected = np.random.normal()  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    on_ranks(1, lambda handed, rank: handed.watch("fit", Augmented(SAME)) is not None)
    assert np.random.normal() == expected  # noqa: NPY002
