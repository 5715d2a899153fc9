"""How ranks that only serve come to their end: the first that is asked to stop tells rank 0, and rank 0 all others.

They wait outside of any collective, asleep, so that nobody takes them for ranks that do not come.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitrain.cluster.record import BEAT_SECONDS, VARIABLE, Record
from mpitrain.comm.communicator import Communicator, Request
from mpitrain.errors import UsageError
from mpitrain.runtime import marks
from mpitrain.runtime.launcher import without_rank
from mpitrain.runtime.signals import StopSignals
from mpitrain.world.world import World

LOOK_SECONDS = 0.1
GRACE_SECONDS = 35.0  # from a signal to the end of this rank, whatever the others do
CLIENT_SECONDS = 5.0  # in which a client ends when it is told to
GOING = -1  # what `asked` says while nobody asks


def wait(communicator: Communicator, asked: Callable[[], int], look_seconds: float = LOOK_SECONDS) -> int:
    """Collective: return on all ranks soon after one of them is asked to stop.

    Each rank sends one message to rank 0, when it is asked or told, and gets one from there. `asked` is called again
    and again; it gives the exit code to stop with, 0 to 255, or `GOING`.

    Returns:
        The exit code: rank 0's own, else that of the first rank it heard of.
    """
    others = range(1, communicator.size) if communicator.rank == 0 else (0,)
    heard = {rank: np.zeros(1, np.int16) for rank in others}
    requests: dict[int, Request] = {rank: communicator.irecv(heard[rank], rank) for rank in others}
    said = np.zeros(1, np.int16)
    code = asked()
    while code == GOING:
        told = [rank for rank in others if requests[rank].test()]
        if told:
            code = int(heard[told[0]][0])
            break
        time.sleep(look_seconds)
        code = asked()
    said[0] = code
    for sent in [communicator.isend(said, rank) for rank in others]:
        sent.wait()
    for request in requests.values():
        request.wait()
    return code if communicator.rank == 0 else int(heard[0][0])


def check_client(command: Sequence[str]) -> None:
    """Local: see whether there is a program to run.

    Raises:
        UsageError: there is no such script, or no module is named.
    """
    if command[:1] == ["-m"] and len(command) == 1:
        raise UsageError("-m: name the module that is the client")
    if command and command[0] != "-m" and not Path(command[0]).is_file():
        raise UsageError(f"there is no client {command[0]}: name a Python script, or -m and a module")


@dataclass
class ClientProcess:
    """A program that uses the cluster, as a process of its own on rank 0's host."""

    process: subprocess.Popen[bytes]  # it

    @classmethod
    def start(cls, command: Sequence[str], record: Record, environ: Mapping[str, str]) -> ClientProcess:
        """Local: start a Python program.

        The command is a script, or -m and a module, with its arguments.
        """
        own = {**without_rank(environ), VARIABLE: str(record.path)}
        argv = [sys.executable, "-m", "mpitrain.cluster.client_main", str(os.getpid()), *command]
        return cls(subprocess.Popen(argv, env=own, stdin=subprocess.DEVNULL))

    def code(self) -> int:
        """Local: its exit code, as shells count it; `GOING` while it runs."""
        code = self.process.poll()
        return GOING if code is None else 128 - code if code < 0 else code

    def end(self) -> None:
        """Local: end it, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(CLIENT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def serve_until_stopped(world: World, record: Record, client: ClientProcess | None, signals: Signals) -> int:
    """Collective: wait for Ctrl-C or another signal to any rank, `mpitrain serve --stop`, or the client's end.

    Returns:
        The client's exit code if it came to its end by itself, else 0; the same on all ranks.
    """
    beat = time.monotonic()

    def asked() -> int:
        nonlocal beat
        if signals.came:
            return 0
        if not world.is_root:
            return GOING
        code = GOING if client is None else client.code()
        if code == GOING and time.monotonic() - beat > BEAT_SECONDS / 4:
            beat = time.monotonic()
            code = GOING if record.beat() else 0
        return code

    try:
        return wait(world.communicator, asked)
    finally:
        if client is not None:
            client.end()
        signals.end()


class Signals:
    """Notes from now on that a signal came to this rank; a rank that does not end soon after is ended."""

    def __init__(self, world: World) -> None:
        self.came = False
        self._world = world
        self._signals = StopSignals(GRACE_SECONDS, self._request, self._late)
        if self._signals.install() and world.is_root:
            marks.tell("graceful", world.rank)  # to `mpitrain run`: signals are requests

    def _request(self, number: int) -> None:
        self.came = True

    def end(self) -> None:
        """Local: signals do what they did before, but for those that end this rank while it leaves."""
        self._signals.remove()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            # The end that is under way is not to be cut short by a second signal.
            signal.signal(number, signal.SIG_IGN)

    def _late(self, number: int) -> None:
        sys.stderr.write(
            f"mpitrain: rank {self._world.rank} ({self._world.topology.host}) got {signal.Signals(number).name}, but "
            f"the other ranks did not end within {GRACE_SECONDS:g} s; the job ends now\n"
        )
        sys.stderr.flush()
        self._world.communicator.abort(1)
