"""Starts the watchdog: every rank learns over MPI where the others can be reached without MPI."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from mpitrain.comm.communicator import Communicator
from mpitrain.faults import guardian, handshake, interfaces
from mpitrain.faults.exit_status import end_now
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.watchdog import Watchdog
from mpitrain.runtime import streams
from mpitrain.runtime.exit_codes import STALLED
from mpitrain.runtime.launcher import own_rank
from mpitrain.runtime.topology import Topology

STARVED_SECONDS = 2.0
TOLD_SECONDS = 0.5  # in which the rank that speaks has done so
BACKLOG = 128  # connections of others that wait to be taken


def start(
    communicator: Communicator, topology: Topology, options: FaultOptions, environ: Mapping[str, str]
) -> Watchdog | None:
    """Collective: a watchdog that runs; None for a job of one rank, or where a rank cannot listen."""
    if communicator.size == 1:
        return None
    one_host = topology.node_count == 1
    offers = communicator.all_gather_obj([interfaces.LOOPBACK] if one_host else interfaces.offered(environ))
    try:
        listeners = interfaces.listen(interfaces.used(offers[topology.rank], offers), BACKLOG + communicator.size)
        places = tuple(listener.getsockname() for listener in listeners)
        everyone = communicator.all_gather_obj((places, Process.current(), handshake.new_token()))
    except OSError:
        # The collective in which the others are, whatever this one has to tell.
        everyone = communicator.all_gather_obj(None)
    if None in everyone:
        if topology.is_root:
            ranks = ", ".join(str(rank) for rank, found in enumerate(everyone) if found is None)
            streams.write_stderr(
                f"mpitrain: warning: rank {ranks} cannot listen on a TCP port, so stalls are not watched\n"
            )
        return None
    seats = tuple(
        Seat(rank, topology.hosts[rank], topology.nodes[rank], process, places)
        for rank, (places, process, _) in enumerate(everyone)
    )
    # Each has made a token; that of rank 0 is the job's.
    roster = Roster(topology.rank, seats, everyone[0][2])
    watchdog = Watchdog(communicator.activity, roster, listeners, options, communicator.abort, streams.write_stderr)
    watchdog.start()
    here = roster.neighbours(range(communicator.size), roster.own)
    # One process a host is enough to watch all its ranks.
    if here[0].rank == roster.own:
        guardian.start(seat.process.pid for seat in here)
    return watchdog


@contextlib.contextmanager
def limit(seconds: float, end: Callable[[int], object] = end_now, warning_seconds: float = 0.0) -> Iterator[None]:
    """Local: end this process when ranks do not find each other, before there is a watchdog.

    Args:
        seconds: for what is done in this context; 0 for no limit.
        end: ends it, with an exit code.
        warning_seconds: after which it is told before that; 0 for never.
    """
    met = threading.Event()
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def watch() -> None:
        began, speaks = time.monotonic(), None
        for due in sorted({seconds, warning_seconds} - {0.0}):
            while not met.wait(max(0.0, began + due - time.monotonic())):
                if time.monotonic() - began - due < STARVED_SECONDS:
                    break
                began = time.monotonic() - due / 2  # this process did not run, or not this thread: nothing is known
            if met.is_set():
                return
            speaks = _is_first(claim) if speaks is None else speaks
            if speaks:
                streams.write_stderr(_late(due, seconds))
            elif due == seconds:
                time.sleep(TOLD_SECONDS)
            if due == seconds:
                end(STALLED)

    if seconds or warning_seconds:
        threading.Thread(target=watch, name="mpitrain start", daemon=True).start()
    try:
        yield
    finally:
        met.set()
        claim.close()


def _late(waited: float, seconds: float) -> str:
    here = f"rank {launcher_rank}" if (launcher_rank := own_rank(os.environ)) >= 0 else "a rank"
    if waited == seconds:
        end = f"it ends with exit code {STALLED} (to wait longer: MPITRAIN_STALL_ABORT)"
    else:
        end = f"if this lasts, the job ends in {seconds - waited:.0f} s" if seconds else "it goes on waiting"
    return (
        f"mpitrain: {here} on {os.uname().nodename} has waited {waited:.0f} s for the others at the start of the job, "
        f"and some have not come. Look whether all of them run, and whether their hosts reach each other; {end}\n"
    )


def _is_first(claim: socket.socket) -> bool:
    """Local: whether no other rank of this host speaks, of those that have the same parent, a launcher."""
    try:
        # An abstract name, which no file stands for: it is free again when this process has ended, however that was.
        claim.bind(f"\0mpitrain start {os.getppid()}")
    except OSError:
        return False
    return True
