"""Horovod's timeline: one array of events for each rank, in Chrome's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from mpitrain.collectives import operations
from mpitrain.horovod import timeline
from mpitrain.training.tape import DistributedGradientTape
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize("cycles", [False, True])
def test_events_of_what_was_exchanged(tmp_path: Path, cycles: bool) -> None:
    def rank(world: World) -> None:
        own = timeline.Timeline(tmp_path / f"{world.rank}.json", world.rank, cycles)
        world.agreement.observer = own
        operations.all_reduce(tf.constant(1.0), "sum", name="one", world=world)
        operations.all_gather(tf.constant([1]), world=world)
        variable = tf.Variable([1.0, 2.0])
        for _ in range(2):  # at the first, variables become the same meanwhile
            with DistributedGradientTape(tf.GradientTape(), world=world) as tape:
                loss = tf.reduce_sum(variable)
            tape.gradient(loss, variable)
        own.close()

    run(2, rank)
    for number in range(2):
        events: list[dict[str, Any]] = json.loads((tmp_path / f"{number}.json").read_text())
        assert {event["pid"] for event in events} == {number}
        assert events[0]["args"]["name"] == f"rank {number}"
        spans = [event for event in events if event["ph"] == "X"]
        kinds = [event["name"] for event in spans]
        assert [kind for kind in kinds if "CHECKSUMS" not in kind][:4] == [
            *("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_ALLGATHER", "ALLGATHER"),
        ]
        assert all(event["dur"] >= 0 for event in spans)
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert rows[spans[0]["tid"]] == "allreduce.one"
        of_tape = [event["name"] for event in spans if rows[event["tid"]] == "gradients of a tape"]
        assert of_tape[-2:] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
        assert any(event["name"] == "CYCLE_START" for event in events) == cycles


def test_a_file_for_each_rank_that_ends_when_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(world: World) -> bool:
        monkeypatch.setenv(timeline.VARIABLE, "DYNAMIC")
        timeline.start_from_environment(world)  # the script will
        assert world.agreement.observer is None
        monkeypatch.setenv(timeline.VARIABLE, str(tmp_path / "a.json"))
        timeline.start_from_environment(world)
        assert world.agreement.observer is not None
        timeline.start(world, str(tmp_path / "b.json"), mark_cycles=False)
        timeline.stop()
        timeline.stop()
        return world.agreement.observer is None

    assert run(1, rank) == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    for name in ("a.json", "b.json"):
        assert [event["name"] for event in json.loads((tmp_path / name).read_text())] == ["process_name"]
