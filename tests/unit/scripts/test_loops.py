"""Batches that a script's own loop reads, divided among ranks: each takes as many steps, and each row counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.portions import Portion
from mpitrain.errors import DataError
from mpitrain.scripts.loops import DividedBatches


def read(sizes: list[int], portion: Portion, whole_counts: bool = True) -> tuple[list[list[int]], list[float], float]:
    """The rows of each batch, how many of them count, and how many after the end."""
    ends = np.cumsum(sizes)
    rows = tf.Variable(1.0, dtype=tf.float64)
    given = iter([tf.range(end - size, end) for size, end in zip(sizes, ends, strict=True)])
    batches, counts = [], []
    for batch in DividedBatches(given, portion, rows, whole_counts):
        batches.append([int(row) for row in batch])
        counts.append(float(rows.numpy()))
    return batches, counts, float(rows.numpy())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize("sizes", [[4, 4, 3], [5] * 4, [2]], ids=str)
def test_each_row_is_taken_once_in_as_many_steps(sizes: list[int], is_global: bool, ranks: int) -> None:
    found = [read(sizes, Portion(rank, ranks, is_global)) for rank in range(ranks)]
    assert len({len(batches) for batches, _, _ in found}) == 1
    if all(size >= ranks for size in sizes):
        taken = [row for batches, _, _ in found for batch in batches for row in batch]
        assert sorted(taken) == list(range(sum(sizes)))
    for batches, counts, after in found:
        assert counts == [len(batch) for batch in batches]
        assert after == 1.0
    if is_global:
        assert [len(found[0][0])] == [len(sizes)]
        assert found[0][0][0] == list(range(0, sizes[0], ranks if sizes[0] >= ranks else 1))


def test_of_a_batch_that_all_take_the_sum_counts_once() -> None:
    found = [read([2], Portion(rank, 3, True), whole_counts=rank == 0) for rank in range(3)]
    assert [(batches, counts) for batches, counts, _ in found] == [
        ([[0, 1]], [2.0]),
        ([[0, 1]], [0.0]),
        ([[0, 1]], [0.0]),
    ]


def test_an_iterator_within_a_graph_is_refused() -> None:
    batches = DividedBatches(iter([tf.range(4)]), Portion(0, 2, True), tf.Variable(1.0, dtype=tf.float64))

    @tf.function
    def step() -> Any:
        return next(batches)

    with pytest.raises(DataError, match="read the batch outside of it"):
        step()
