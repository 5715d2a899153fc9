"""Parts of a job: some of its ranks that act together, and agree among themselves."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import RankLostError
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.topology import topology
from mpitrain.world.policy import MakePolicy, by_size
from mpitrain.world.world import World, world_of


def group(
    world: World, ranks: Sequence[int], faults: FaultOptions | None = None, make_strategy: MakePolicy = by_size
) -> World | None:
    """Collective: all ranks of `world` make a group of some of them.

    A rank that comes to the end of its program says so in all its groups at once, and leaves them when all ranks
    of the job are there: whoever still waits for it in one of them is told, instead of waiting for ever.

    Args:
        world: of whom the ranks are.
        ranks: different, ascending, the same on all ranks.
        faults: how they are dealt with in the group.
        make_strategy: of what its ranks exchange.

    Returns:
        The job as the members see it, with ranks counted from 0; None on ranks that are not members.

    Raises:
        MismatchError: ranks ask for different groups.
        ValueError: on every rank: no such ranks.
    """
    ranks = list(ranks)
    world.agreement.call(f"make a group of ranks {ranks}")
    # Looked at after the agreement: all ranks have named the same ones, so all raise.
    if not ranks or ranks != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < world.size:
        raise ValueError(f"a group needs different ranks from 0 to {world.size - 1} in ascending order, not {ranks}")
    part = world.communicator.split(ranks)
    if part is None:
        return None
    place = topology(
        ranks.index(world.rank), [world.topology.nodes[rank] for rank in ranks], [world.hosts[rank] for rank in ranks]
    )
    # Alone it has nobody to wait for, and MPI is not asked.
    communicator: Communicator = LocalCommunicator() if len(ranks) == 1 else part
    member = world_of(
        communicator, place, world.devices, world.threads, ranks, faults=faults, make_strategy=make_strategy
    )
    if member.size > 1:
        _leave_with(world, member)
    return member


@functools.cache
def communicator_for(world: World) -> Any:
    """Collective: an mpi4py communicator of these ranks for the program's own messages; None where there is no MPI."""
    comm = getattr(world.communicator, "comm", None)
    return None if comm is None else comm.Dup()


def ranks_of(world: World, comm: Any) -> list[int]:
    """Local: the ranks in `world` of the processes of an mpi4py communicator, ascending.

    Raises:
        ValueError: it is none, or has processes of another job.
    """
    find = getattr(world.communicator, "ranks_of", None)
    return [0] if find is None else sorted(find(comm))


def _leave_with(world: World, member: World) -> None:
    """Local: at the end of the program `member` is left in a thread of its own, while `world` is left.

    One group after the other would not do: two ranks could wait for each other in two groups. The thread is
    started now, because Python starts none at exit.
    """
    ended, left = threading.Event(), threading.Event()

    def wait() -> None:
        ended.wait()
        with contextlib.suppress(RankLostError):  # the job is being left as well: who is lost is dealt with there
            member.strategy.leave()
        left.set()

    threading.Thread(target=wait, name="leave group", daemon=True).start()
    world.departures.append((ended.set, left.wait))
