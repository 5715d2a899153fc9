"""Numbers that machine code shares."""

from __future__ import annotations

import ctypes

import numpy as np

from mpitrain.runtime.words import Word, address


class Counts:
    updates = Word(0, int)
    seconds = Word(2, float)
    late = Word(1, bool)

    def __init__(self) -> None:
        self.words = np.zeros(3, np.float64)


def test_attributes_are_elements_of_the_array() -> None:
    counts, other = Counts(), Counts()
    counts.updates += 2
    counts.seconds, counts.late = 0.5, True
    assert counts.words.tolist() == [2.0, 1.0, 0.5]
    assert other.words.tolist() == [0.0, 0.0, 0.0]
    counts.words[:] = 7
    assert (counts.updates, counts.late, counts.seconds) == (7, True, 7.0)
    assert [type(value) for value in (counts.updates, counts.late, counts.seconds)] == [int, bool, float]
    assert isinstance(Counts.updates, Word)


def test_the_address_is_where_the_numbers_are() -> None:
    words = np.array([1.5, 2.5])
    there = (ctypes.c_double * 2).from_address(address(words))
    there[1] = 4.0
    assert words.tolist() == [1.5, 4.0]
    assert address(words[1:]) == address(words) + 8
