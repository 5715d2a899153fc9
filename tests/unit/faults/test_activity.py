"""What a rank is doing, and what it has read, as it is told to others."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.faults.activity import Activity, checksum


def test_phase_ends_with_its_context() -> None:
    activity = Activity()

    def fails() -> None:
        with activity.during("checkpoint"):
            assert activity.phase == "checkpoint"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert activity.phase == "start"


def test_checksums() -> None:
    one, two = np.arange(6.0), np.arange(6.0)
    assert checksum([one]) == checksum([two])
    assert checksum([one]) != checksum([one.reshape(2, 3)])
    assert checksum([one, two]) != checksum([one])
    assert checksum([np.array([b"a", b"b"], object)]) != checksum([np.array([b"a", b"c"], object)])


def test_gradients_of_rows_that_are_dealt_out_are_not_compared() -> None:
    activity = Activity()
    activity.note_gradients(2, [np.ones(3)])
    assert len(activity.gradients) == 1
    activity.divided = True
    activity.note_gradients(3, [np.ones(3)])
    assert len(activity.gradients) == 1
