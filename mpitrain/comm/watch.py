"""Starts the watchdog: every rank learns over MPI where the others can be reached without MPI."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from mpitrain.comm.communicator import Communicator
from mpitrain.faults import wire
from mpitrain.faults.options import STALL_EXIT_CODE, FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.watchdog import Watchdog
from mpitrain.runtime.topology import Topology


def start(
    communicator: Communicator, topology: Topology, options: FaultOptions, environ: Mapping[str, str]
) -> Watchdog | None:
    """Collective: a watchdog that runs; None for a job of one rank, or where a rank cannot listen.

    Args:
        communicator: all ranks.
        topology: where they are.
        options: what is watched.
        environ: tells which network MPI uses.
    """
    if communicator.size == 1:
        return None
    one_host = topology.node_count == 1
    try:
        listener = wire.listen(one_host, communicator.size)
        addresses = tuple(wire.addresses(one_host, environ))
        own = (addresses, listener.getsockname()[1], Process.current(), wire.new_token())
        everyone = communicator.all_gather_obj(own)
    except OSError:
        everyone = communicator.all_gather_obj(None)
    if None in everyone:
        if topology.is_root:
            ranks = ", ".join(str(rank) for rank, found in enumerate(everyone) if found is None)
            write(f"mpitrain: warning: rank {ranks} cannot listen on a TCP port, so stalls are not watched\n")
        return None
    seats = tuple(
        Seat(rank, topology.hosts[rank], topology.nodes[rank], process, places, port)
        for rank, (places, port, process, _) in enumerate(everyone)
    )
    roster = Roster(topology.rank, seats, everyone[0][3])
    watchdog = Watchdog(communicator.activity, roster, listener, options, communicator.abort, write)
    watchdog.start()
    return watchdog


@contextlib.contextmanager
def limit(seconds: float, end: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Local: end this process when ranks do not find each other, before there is a watchdog.

    Args:
        seconds: for what is done in this context; 0 for no limit.
        end: ends it, with an exit code.
    """

    def late() -> None:
        host = os.uname().nodename
        write(
            f"mpitrain: a rank on {host} has waited {seconds:.0f} s for the others at the start of the job. Look "
            "whether all of them run, and whether their hosts reach each other; it ends with exit code "
            f"{STALL_EXIT_CODE} (to wait longer: MPITRAIN_STALL_ABORT)\n"
        )
        end(STALL_EXIT_CODE)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    if seconds > 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write(text: str) -> None:
    """Local: print to standard error, in one piece, whatever Python's own stream is bound to."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
