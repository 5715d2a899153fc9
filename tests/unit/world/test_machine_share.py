"""What each rank has of its host."""

from __future__ import annotations

import os

import pytest

from mpitrain.errors import AgreedError, UsageError
from mpitrain.runtime import devices as device_rules
from mpitrain.runtime import gpus
from mpitrain.runtime import threads as thread_rules
from mpitrain.runtime.devices import DevicePlan
from mpitrain.world import machine_share
from mpitrain.world.world import World
from tests.unit.job import run

HOSTS = ["node1", "node2", "node1"]


def test_ranks_of_a_host_know_what_each_has() -> None:
    def rank(world: World) -> list[str]:
        return machine_share.on_this_host(world.communicator, world.topology, f"of {world.rank}")

    assert run(3, rank, HOSTS) == [["of 0", "of 2"], ["of 1"], ["of 0", "of 2"]]


def test_ranks_share_the_cores_of_their_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_rules, "available_cores", lambda: frozenset(range(4)))
    for name in (thread_rules.INTRA_VARIABLE, thread_rules.INTER_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    def rank(world: World) -> int:
        return machine_share.threads(world.communicator, world.topology, None, None).intra

    assert run(3, rank, HOSTS) == [2, 4, 2]


def test_without_a_gpu_a_rank_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: ())
    monkeypatch.setattr(os, "environ", {**os.environ})

    def rank(world: World) -> DevicePlan:
        return machine_share.devices(world.communicator, world.topology, "auto", False, None, None)

    for plan in run(2, rank):
        assert plan.device is None
        assert "CPU" in plan.description


def test_one_ranks_error_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: ())
    seen: list[int] = []

    def narrowed(found: object, names: str) -> object:
        seen.append(1)
        if len(seen) == 1:  # on one rank alone
            raise UsageError("no such device")
        return found

    monkeypatch.setattr(device_rules, "narrowed", narrowed)

    def rank(world: World) -> str:
        with pytest.raises(AgreedError) as caught:
            machine_share.devices(world.communicator, world.topology, "auto", False, None, "0")
        return str(caught.value)

    assert all("no such device" in text for text in run(2, rank))
