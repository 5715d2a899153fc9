"""Ranks that read the same batches."""

from __future__ import annotations

import pytest

from mpitrain.faults.same_data import SameData


def add_all(found: SameData, sums: list[tuple[list[int], list[int]]]) -> str | None:
    verdicts = []
    for rank, (batches, gradients) in enumerate(sums):
        found.add(rank, batches, gradients)
        verdicts.append(found.verdict())
    assert verdicts[:-1] == [None] * (len(sums) - 1)
    return verdicts[-1]


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ([([1, 2, 3], []), ([1, 2, 3], [])], "ranks 0, 1 had the same first 3 batches"),
        ([([1, 2, 3], [5, 6, 7]), ([1, 2, 4], [5, 6, 7])], None),
        ([([], [5, 6, 7]), ([], [5, 6, 8]), ([], [5, 6, 7])], "ranks 0, 2 had the same first 3 gradients"),
        ([([1, 1, 1], []), ([1, 1, 1], [])], None),  # constant data
        ([([1, 2], []), ([1, 2], [])], None),  # not enough of it
    ],
)
def test_same_data(sums: list[tuple[list[int], list[int]]], words: str | None) -> None:
    text = add_all(SameData(len(sums)), sums)
    assert (text is None) if words is None else (text is not None and words in text)
