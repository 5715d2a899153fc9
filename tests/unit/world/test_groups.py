"""Groups of ranks: their numbers, their messages, and leaving them."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.errors import MismatchError, RankFinishedError
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.world.end import finish
from mpitrain.world.groups import group
from mpitrain.world.world import World, world_of
from tests import simulated


def world(communicator: simulated.SimulatedCommunicator) -> World:
    hosts = [f"host{rank // 2}" for rank in range(communicator.size)]
    place = topology(communicator.rank, hosts, hosts)
    return world_of(communicator, place, DevicePlan(), ThreadPlan(1, 2))


def test_members_act_together_and_others_do_not() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> tuple[int, int, float, tuple[str, ...]] | None:
        job = world(communicator)
        member = group(job, [1, 3])
        alone = group(job, [2])
        assert (alone is not None) == (job.rank == 2)
        assert alone is None or (alone.size, alone.communicator.size) == (1, 1)
        finish(job)
        if member is None:
            return None
        total = np.array([float(job.rank)])
        member.communicator.all_reduce(total)
        return member.rank, member.size, float(total[0]), member.hosts

    hosts = ("host0", "host1")
    assert simulated.run(4, body) == [None, (0, 2, 4.0, hosts), None, (1, 2, 4.0, hosts)]


def test_messages_give_the_numbers_of_the_job() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> str:
        member = group(world(communicator), [0, 2])
        if member is None:
            return ""
        with pytest.raises(MismatchError) as caught:
            member.agreement.call(f"call of {member.rank}")
        return str(caught.value)

    text = simulated.run(3, body)[0]
    assert "rank 0 (host0): call of 0" in text
    assert "rank 2 (host1): call of 1" in text


def test_ranks_that_ask_for_different_or_impossible_groups_are_told() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> None:
        job = world(communicator)
        with pytest.raises(MismatchError, match=r"make a group of ranks \[1\]"):
            group(job, [job.rank])
        for ranks in ([], [0, 2], [1, 0], [0, 0], [-1]):
            with pytest.raises(ValueError, match="different ranks from 0 to 1"):
                group(job, ranks)

    simulated.run(2, body)


def test_a_rank_that_ends_is_named_in_every_group() -> None:
    """Each of two ranks waits in another group: leaving one after the other would never end."""

    def body(communicator: simulated.SimulatedCommunicator) -> str:
        job = world(communicator)
        first, second = group(job, [0, 1]), group(job, [0, 1, 2])
        assert second is not None
        told = ""
        if job.rank == 1:
            assert first is not None
            with pytest.raises(RankFinishedError) as caught:
                first.agreement.call("something")
            told = str(caught.value)
        finish(job)
        return told

    assert "rank 1 (host0) called something, but rank 0 (host0) will not come" in simulated.run(3, body)[1]
