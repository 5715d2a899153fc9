"""Batches that a script's own loop reads, divided among ranks: each takes as many steps, and each row counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.portions import Portion
from mpitrain.errors import DataError
from mpitrain.scripts.loops import CountsFor, DividedBatches


def read(sizes: list[int], portion: Portion, whole: bool = True) -> tuple[list[list[int]], list[Any], Any]:
    """The rows of each batch, what they count for (rows and share), and what a step after the end counts for."""
    ends = np.cumsum(sizes)
    counts = CountsFor(whole)
    given = iter([tf.range(end - size, end) for size, end in zip(sizes, ends, strict=True)])
    batches, seen = [], []

    def now() -> tuple[float, float]:
        return float(counts.rows.numpy()), float(counts.share.numpy())

    for batch in DividedBatches(given, portion, counts):
        batches.append([int(row) for row in batch])
        seen.append(now())
    return batches, seen, now()


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
        assert [rows for rows, _ in counts] == [len(batch) for batch in batches]
        assert after == (1.0, 1.0)
    for step in zip(*[counts for _, counts, _ in found], strict=True):
        own = [share for _, share in step]
        assert sum(own) == pytest.approx(1.0) or own == [1.0] * ranks, "where all take the same, one counts"
    if is_global:
        assert [len(found[0][0])] == [len(sizes)]
        assert found[0][0][0] == list(range(0, sizes[0], ranks if sizes[0] >= ranks else 1))


def test_of_a_batch_that_all_take_the_sum_counts_once() -> None:
    found = [read([2], Portion(rank, 3, True), whole=rank == 0) for rank in range(3)]
    assert found == [
        ([[0, 1]], [(2.0, 1.0)], (1.0, 1.0)),
        ([[0, 1]], [(0.0, 1.0)], (0.0, 1.0)),
        ([[0, 1]], [(0.0, 1.0)], (0.0, 1.0)),
    ]


def test_an_iterator_within_a_graph_is_refused() -> None:
    batches = DividedBatches(iter([tf.range(4)]), Portion(0, 2, True), CountsFor(True))

    @tf.function
    def step() -> Any:
        return next(batches)

    with pytest.raises(DataError, match="read the batch outside of it"):
        step()
