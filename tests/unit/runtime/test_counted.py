"""Numbers of things, in words; and that no message writes them without."""

from __future__ import annotations

import pytest

from mpitrain.runtime.counted import counted


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (1, "validation sample", "1 validation sample"),
        (1200, "test sample", "1,200 test samples"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
        (2, "batch", "2 batches"),
    ],
)
def test_words(number: int, noun: str, expected: str) -> None:
    assert counted(number, noun) == expected
