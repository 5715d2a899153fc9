"""What a rank says of itself: for how long it waits, where it is, and what it has read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.faults import activity as activities
from mpitrain.faults.activity import LOOKED_AT_BATCHES, Activity, checksum, describe
from mpitrain.faults.heartbeat import Heartbeat
from mpitrain.faults.processes import Process

BEAT_SECONDS = 0.5


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "move", "nothing"]), st.integers(1, 8)), max_size=12))
def test_a_wait_is_never_told_shorter_than_it_is(events: list[tuple[str, int]]) -> None:
    """And longer by less than the time between two looks."""
    activity = Activity()
    heart = Heartbeat(activity, BEAT_SECONDS)
    now, since = 100.0, 100.0  # when what it is in was entered, or last moved
    for event, halves in events:
        if event == "enter":
            activity.inside, since = "a bucket", now
            activity.position += 1
        elif event == "leave":
            activity.inside = None
        elif event == "move" and activity.inside is not None:
            activity.moved, since = activity.moved + 1, now
        for _ in range(halves):
            now += BEAT_SECONDS
            (beat,) = heart.beat(now)
            truth = 0.0 if activity.inside is None else now - since
            assert truth <= beat["waiting"] <= truth + BEAT_SECONDS * (truth > 0)
            assert (beat["position"], beat["phase"]) == (activity.position, "start")


def test_the_first_batches_are_told_once_they_are_known() -> None:
    activity = Activity()
    heart = Heartbeat(activity, BEAT_SECONDS)
    assert len(heart.beat(1.0)) == 1

    def told() -> list[Any]:
        return [(one["batches"], one["gradients"]) for one in heart.beat(1.0) if one["is"] == "data"]

    for number in range(LOOKED_AT_BATCHES):
        assert told() == [], "some are no proof"
        activity.note_batch([np.full(2, number)])
    batches = activity.batches
    assert told() == [(batches, [])]
    assert told() == []
    activity.note_gradients(2, [np.ones(1)])
    assert told() == [(batches, activity.gradients)]
    heart.restart()  # another rank is the hub, which knows nothing
    assert told() == [(batches, activity.gradients)]
    for _ in range(5):
        activity.note_batch([np.zeros(1)])
    assert told() == []


def test_gradients_that_tell_nothing_are_not_noted() -> None:
    activity = Activity()
    activity.note_gradients(1, [np.ones(1)])  # ranks may have started from other weights
    activity.divided = True
    activity.note_gradients(2, [np.ones(1)])
    assert activity.gradients == []


@pytest.mark.parametrize(
    ("inside", "phase", "told"),
    [
        (None, "compute", ("compute", None)),
        ("metrics\nand more", "compute", ("exchange", "metrics")),
        ("the end", "end", ("end", "the end")),
    ],
)
def test_an_answer_tells_where_a_rank_is(inside: Any, phase: Any, told: tuple[str, str | None]) -> None:
    activity = Activity()
    activity.inside, activity.phase, activity.updates, activity.position = inside, phase, 7, 9
    own = Process.current()
    answer = Heartbeat(activity, BEAT_SECONDS).state(3, [(1, own.pid, own.started), (2, own.pid, 1)], 5.0)
    assert (answer["phase"], answer["inside"]) == told
    assert (answer["is"], answer["question"], answer["updates"], answer["position"]) == ("state", 3, 7, 9)
    assert answer["neighbours"][1] in ("R", "S", "D")
    assert answer["neighbours"][2] is None, "an earlier process of that number"
    assert answer["resident"] > 1 << 20
    assert "test_heartbeat.py" not in str(answer["stacks"]), "this thread is the watchdog's"


class Plan:
    def describe_bucket(self, index: int) -> str:
        return f"bucket {index} of a plan"


def test_what_a_rank_is_in_is_one_line() -> None:
    assert describe((Plan(), 2)) == "bucket 2 of a plan"
    assert len(describe("x" * 1000)) == 200


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).copy(), True),
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2), False),
        (np.array(["a", "bc"], object), np.array(["a", "bc"], object), True),
        (np.array(["a", "bc"], object), np.array(["ab", "d"], object), False),
        (np.zeros(activities.LONGEST_BYTES // 8 + 1), np.eye(1, activities.LONGEST_BYTES // 8 + 1, 0)[0], False),
        (np.zeros(0), np.zeros((0, 1)), False),
    ],
)
def test_checksums(one: Any, other: Any, same: bool) -> None:
    assert (checksum([one]) == checksum([other])) == same
    assert (checksum([one, one]) == checksum([one])) is False


def test_a_phase_ends_with_its_block() -> None:
    activity = Activity()

    def fail() -> None:
        with activity.during("checkpoint"):
            phases.append(activity.phase)
            raise ZeroDivisionError

    phases: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert [*phases, activity.phase] == ["checkpoint", "start"]
