"""One rank of a job without MPI, which has nothing but a watchdog. Arguments: rank, size, directory, what it does."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mpitrain.faults import interfaces
from mpitrain.faults.activity import Activity
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit, Fault
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.watchdog import Watchdog


def write(text: str) -> None:
    os.write(1, text.encode())


def abort(code: int) -> None:
    """As MPI does it, this takes a moment; and no launcher ends the others meanwhile."""
    time.sleep(2.0)
    os._exit(code)


def meet(rank: int, size: int, directory: Path, apart: bool) -> Watchdog:
    """What the ranks of a job tell each other over MPI, told through files; apart, each is on a host of its own."""
    (listener,) = listeners = interfaces.listen([interfaces.LOOPBACK], size)
    own = Process.current()
    part = directory / f"{rank}.part"
    part.write_text(json.dumps([listener.getsockname()[1], own.pid, own.started]))
    part.rename(directory / f"{rank}.json")
    while len(list(directory.glob("*.json"))) < size:
        time.sleep(0.01)
    found = [json.loads((directory / f"{other}.json").read_text()) for other in range(size)]
    seats = tuple(
        Seat(other, "here", other * apart, Process(pid, started), ((interfaces.LOOPBACK, port),))
        for other, (port, pid, started) in enumerate(found)
    )
    options = FaultOptions.of(os.environ, stall_warning=2, stall_abort=5)
    return Watchdog(Activity(), Roster(rank, seats, "secret"), listeners, options, abort, write)


def main(rank: int, size: int, directory: Path, what: str) -> None:
    watchdog = meet(rank, size, directory, what.startswith("apart"))
    if what == "apart, and the hub is busy" and rank == 0:
        time.sleep(4)
    watchdog.start()
    activity = watchdog.activity
    activity.phase, activity.updates = "compute", 7
    late = rank == size - 1
    (directory / f"{rank}.ready").touch()
    if what == "fails alike":
        culprit = Culprit(rank, "here", os.getpid())
        told = watchdog.report(Fault("exception", f"line of rank {rank}\nValueError: alike", 1, (culprit,)), 10.0)
        time.sleep(0.0 if told else 60.0)
        os._exit(1)
    if what == "forks" and late and os.fork() == 0:
        time.sleep(20)  # the connection is closed here, so nobody waits for this child to learn of the parent's end
        os._exit(0)
    if what.startswith("late"):
        activity.phase = "evaluation" if what == "late in evaluation" and late else "compute"
        if not late:
            activity.position, activity.inside = 1, "an exchange"
    if what == "ends well":
        time.sleep(1.5)
        watchdog.ending(0, "called sys.exit(4)")
        watchdog.stop()
        return
    time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
