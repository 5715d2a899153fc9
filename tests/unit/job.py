"""Jobs whose ranks are threads of this process: what is collective runs as it does under MPI, and no mpirun starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.world.world import World, world_of
from tests import simulated

Result = TypeVar("Result")


def run(size: int, body: Callable[[World], Result], hosts: Sequence[str] = ()) -> list[Result]:
    """What `body` returns on each rank.

    Args:
        size: number of ranks.
        body: what a rank does; the first error of a rank is raised here.
        hosts: of each rank; one for all by default.
    """
    names = list(hosts) or ["host"] * size

    def rank(communicator: simulated.SimulatedCommunicator) -> Result:
        place = topology(communicator.rank, names, names)
        return body(world_of(communicator, place, DevicePlan(), ThreadPlan(1, 8)))

    return simulated.run(size, rank)
