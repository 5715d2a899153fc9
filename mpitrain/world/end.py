"""The end of the program, to which all ranks come together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal

from mpitrain.errors import RankLostError
from mpitrain.faults.exits import Exits
from mpitrain.faults.options import SHRINK
from mpitrain.runtime import marks
from mpitrain.world.shrink import AT_END, shrink
from mpitrain.world.world import World

FINALIZE_SECONDS = 60


def finish(world: World, exits: Exits | None = None) -> None:
    """Collective: leave with all the others. Called at the end of the program."""
    world.activity.phase = "end"
    if world.watchdog is not None and exits is not None:
        # Before it waits: after an exit code above 0 the hub ends the others, where they do not come to their end, too.
        world.watchdog.ending(exits.status.code, exits.status.text)
        if exits.status.code:
            world.agreement.missed = world.watchdog.missed
    for begin, _ in world.departures:
        begin()
    _leave(world)
    for _, wait in world.departures:
        wait()  # no thread of ours is in MPI any more when it ends
    if world.watchdog is not None:
        world.watchdog.stop()
    marks.finished(world.rank)


def finish_with(exits: Exits, world: World) -> None:
    """Local: whatever the end of this program is, it leaves with all the others."""
    exits.finish = functools.partial(_finish_at_once, world, exits)
    atexit.register(_finish, world, exits, os.getpid())


def _finish(world: World, exits: Exits, pid: int) -> None:
    """Collective: at the end of the program; a forked child is no rank."""
    if os.getpid() == pid:
        finish(world, exits)


def _finish_at_once(world: World, exits: Exits) -> None:
    """Collective: leave with all the others, and leave MPI, which the end of Python would do."""
    from mpitrain.comm.mpi import finalize

    finish(world, exits)
    finalize()


def _leave(world: World) -> None:
    """Collective: at the end of the program, wait for all ranks that are left."""
    try:
        world.strategy.leave()
    except RankLostError:
        if world.faults.on_failure != SHRINK:
            raise
        shrink(world, AT_END)
        _leave(world)
        return
    if world.watchdog is not None and world.size < len(world.watchdog.roster.seats):
        # All is done. Should MPI_Finalize wait for the lost (seen, see `comm.mpi`), no Python thread could end it.
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(FINALIZE_SECONDS)
