"""A job with parameter servers whose ranks are threads, and the gradients that its workers have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.comm import simulated
from mpitrain.comm import world as worlds
from mpitrain.comm.world import World, world_of
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.strategies.options import ServerOptions
from mpitrain.strategies.parameter_server import connect
from tests.unit.mortal import MortalCommunicator


class DeathError(Exception):
    """Raised by `work` on a worker that dies."""


def run(ranks: int, work: Callable[[World], Any], dying: Sequence[int] = (), **options: Any) -> list[Any]:
    """What `work` returns on each worker, once the servers have ended.

    Args:
        ranks: of the job.
        work: what a worker does.
        dying: workers, by their ranks in the job, on which it raises DeathError.
        options: of the servers.
    """
    before = list(worlds._current)

    def body(communicator: Any) -> Any:
        hosts = ["host"] * communicator.size
        place = topology(communicator.rank, hosts, hosts)
        if dying:
            communicator = MortalCommunicator.of(communicator, [rank for rank in range(ranks) if rank not in dying])
        world = world_of(communicator, place, DevicePlan(), ThreadPlan(1, 8))
        world.faults = FaultOptions(on_failure="shrink" if dying else "abort")
        member = connect(world, ServerOptions(**options))
        try:
            result = None if member is None else work(member)
        except DeathError:
            communicator.revoke()  # as the first does that notices it
            return None
        world.finish()
        return result

    try:
        return [result for result in simulated.run(ranks, body) if result is not None]
    finally:
        worlds._current[:] = before


def gradients_of(worker: int, step: int, shapes: list[tuple[int, ...]]) -> list[Any]:
    """The gradients of any worker, in float64."""
    random = np.random.default_rng(1000 * worker + step)
    return [random.normal(size=shape) for shape in shapes]


def samples_of(worker: int, step: int) -> int:
    """Of how many samples they are."""
    return 1 + (worker + step) % 3
