"""Starts one rank where it belongs: mpirun starts this here in place of the rank, and it goes by ssh to the host.

    python -m mpitrain.launch.daemonless.starter a:2,b:2 slot 'ssh -o ...' A,B program ...

So mpirun has no daemons on other hosts, without which it would end the job: a host that is lost is, for mpirun, a
process here that was killed. A rank of this host becomes this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpitrain.launch.daemonless.keeper import BEAT_SECONDS, CHUNK_BYTES, Order
from mpitrain.launch.daemonless.places import Place, place_of
from mpitrain.launch.daemonless.request import INTERFACE_VARIABLE
from mpitrain.launch.listener import Listener
from mpitrain.launch.request import matches
from mpitrain.launch.ssh import check_host, quoted
from mpitrain.launch.ssh_program import NO_CONNECTION
from mpitrain.runtime import process_tree
from mpitrain.runtime.hostfile import parse
from mpitrain.runtime.launcher import own_rank
from mpitrain.runtime.marks import RUN_VARIABLE, Reporter
from mpitrain.runtime.topology import NODE_VARIABLE

# Without these a rank would not find the others; but directories that mpirun has made, and interfaces, are of its host.
OF_MPI = ("PMIX_*", "OMPI_*", "OPAL_*")
OF_THIS_HOST = ("PMIX_SERVER_TMPDIR", "PMIX_SYSTEM_TMPDIR", "OMPI_FILE_LOCATION", INTERFACE_VARIABLE)
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# An sshd refuses connections by chance when more than 10 are being made to it.
AT_ONCE = 8
WAIT_SECONDS, TURN_SECONDS = 0.05, 30.0


class Connection:
    """To one rank on another host.

    Args:
        place: of the rank.
        ssh: program and options by which its host is reached.
        order: what is started there.
    """

    def __init__(self, place: Place, ssh: Sequence[str], order: Order) -> None:
        me = os.getpid()
        # In a session of its own: a signal for the rank is for this process, and its group.
        self.process = subprocess.Popen(
            [*ssh, check_host(place.host), quoted(keeper_words())],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: process_tree.die_with_parent(signal.SIGKILL, me),  # noqa: PLW1509 (there are no threads)
        )
        self._listener = Listener(order.token)
        self._write(order.line())

    @property
    def started(self) -> bool:
        """The rank runs."""
        return bool(self._listener.ranks("started"))

    @property
    def code(self) -> int | None:
        """How the rank has ended, as of `subprocess`; None if that was not told."""
        told = [mark.detail for mark in self._listener.marks if mark.event == "ended"]
        return int(told[0]) if told else None

    def send(self, signum: int) -> None:
        """Local: hand a signal on."""
        self._write(b"%d\n" % signum)

    def pump(self, until_started: bool = False) -> None:
        """Local: hand on what comes, and say that this process is there, until the connection ends.

        Args:
            until_started: or the rank has been started.
        """
        source = self.process.stderr
        assert source is not None
        beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not (until_started and self.started):
                if selector.select(BEAT_SECONDS):
                    data = os.read(source.fileno(), CHUNK_BYTES)
                    _write_all(2, self._listener.feed(data))
                    if not data:
                        return
                if time.monotonic() - beat >= BEAT_SECONDS:
                    beat = time.monotonic()
                    self._write(b"\n")

    def _write(self, data: bytes) -> None:
        target = self.process.stdin
        assert target is not None
        with contextlib.suppress(OSError):
            _write_all(target.fileno(), data)


def keeper_words() -> list[str]:
    """Local: what is executed on the other host. This package is found there where it is here."""
    here = str(Path(__file__).resolve().parents[3])
    return ["env", f"PYTHONPATH={here}", "PYTHONSAFEPATH=1", sys.executable, "-m", "mpitrain.launch.daemonless.keeper"]


def main(arguments: Sequence[str]) -> int:
    """Local: become the rank, or stand for it until it ends.

    Args:
        arguments: hosts with their slots; how ranks are mapped to them; program and options to reach them; names of the
            variables to hand on; and what the rank executes.
    """
    hosts, map_by, ssh, names, *words = arguments
    rank, ranks = own_rank(os.environ), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    place = place_of(rank, ranks, parse(hosts), map_by)
    environ = {**os.environ, **place.variables()}
    if is_here(check_host(place.host)):
        os.execvpe(words[0], words, environ)
    process_tree.die_with_parent(signal.SIGKILL)  # an mpirun that ends without a word leaves no rank behind
    order = Order(rank, secrets.token_hex(8), str(Path.cwd()), tuple(words), for_rank(environ, names.split(",")))
    with _turn(place, environ):
        connection = Connection(place, shlex.split(ssh), order)
        for signum in HANDED_ON:
            signal.signal(signum, lambda number, _: connection.send(number))
        connection.pump(until_started=True)
    if connection.started:
        _tell(environ, "started", rank, place.host)
    connection.pump()
    ssh_code = connection.process.wait()
    code = connection.code
    if code is None:
        # ssh also ends with what could not be executed on the host.
        lost = connection.started or ssh_code <= 0
        ssh_code = NO_CONNECTION if lost else ssh_code
        _tell(environ, "lost", rank, f"{ssh_code} {place.host}")
        code = -signal.SIGKILL if connection.started else ssh_code
    return _end(code)


def for_rank(environ: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The variables that are sent to the host of a rank."""
    wanted = (*named, *OF_MPI, NODE_VARIABLE)
    return {name: value for name, value in environ.items() if matches(name, wanted) and name not in OF_THIS_HOST}


def is_here(host: str) -> bool:
    """Local: whether a name is this host's: one of its addresses then can be listened on."""
    own = os.uname().nodename
    if host in ("localhost", own, own.partition(".")[0]):
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
                return True
    return False


@contextlib.contextmanager
def _turn(place: Place, environ: Mapping[str, str]) -> Iterator[None]:
    """Local: wait until few enough connections to a host are being made.

    Other users of this host could take all names: then there is no turn, and no harm but a connection made anew.
    """
    name = f"\0mpitrain {environ.get('PMIX_NAMESPACE')} {place.node} {place.local_rank % AT_ONCE}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as turn:
        end = time.monotonic() + TURN_SECONDS
        while not _is_bound(turn, name) and time.monotonic() < end:
            time.sleep(WAIT_SECONDS)
        yield


def _is_bound(turn: socket.socket, name: str) -> bool:
    try:
        turn.bind(name)
    except OSError:
        return False
    return True


def _tell(environ: Mapping[str, str], event: str, rank: int, detail: str) -> None:
    secret = environ.get(RUN_VARIABLE)
    if secret:
        Reporter(secret, 2).tell(event, rank, detail)


def _end(code: int) -> int:
    """Local: end as the rank has ended. For mpirun, only one that was killed is one that others can go on without."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # this process is not the one that has failed
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
