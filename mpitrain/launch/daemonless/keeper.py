"""Keeps one rank on its host: starts it for a `starter` on another one, and ends it when nothing comes from there.

    ssh HOST python -m mpitrain.launch.daemonless.keeper

It reads lines: first a JSON object (see `Order`), then numbers of signals for the rank, and empty ones, which say that
the starter is there. What the rank is given is read and no argument, because arguments can be seen by all users.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from mpitrain.runtime import process_tree
from mpitrain.runtime.marks import Reporter

BEAT_SECONDS = 1.0  # between lines of the starter
SILENCE_SECONDS = 30.0  # after which there is no starter any more, or no way to it
END_SECONDS = 1.0  # in which processes that a rank has left behind end on SIGTERM
NOT_STARTED = 127
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Order:
    """What is to be started."""

    rank: int  # its number
    token: str  # what marks for the starter begin with
    directory: str  # in which it works
    words: tuple[str, ...]  # program and arguments
    environment: Mapping[str, str]  # variables, added to those that ssh has set here

    def line(self) -> bytes:
        """For the keeper's standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Order:
        """What was written."""
        read = json.loads(line)
        return cls(read["rank"], read["token"], read["directory"], tuple(read["words"]), read["environment"])


def lines(descriptor: int, silence_seconds: float) -> Iterator[bytes]:
    """Local: the lines that come, until there are no more, or none for so long."""
    rest = b""
    while select.select([descriptor], [], [], silence_seconds)[0]:
        data = os.read(descriptor, CHUNK_BYTES)
        if not data:
            return
        *complete, rest = (rest + data).split(b"\n")
        yield from complete


def main() -> int:
    """Local: keep a rank until it ends, or has to."""
    coming = lines(0, SILENCE_SECONDS)
    first = next(coming, None)
    if first is None:
        return NOT_STARTED
    order = Order.of(first)
    reporter = Reporter(order.token, os.dup(2))
    process_tree.adopt_orphans()
    terminal, output = _terminal()
    try:
        child = _start(order, output)
    except OSError as error:
        sys.stderr.write(f"mpitrain: rank {order.rank} cannot be started on {os.uname().nodename}: {error}\n")
        reporter.tell("ended", order.rank, NOT_STARTED)
        return NOT_STARTED
    os.close(output)
    reporter.tell("started", order.rank)
    threading.Thread(target=_listen, args=(coming, child), daemon=True).start()
    printing = threading.Thread(target=_hand_on, args=(terminal,), daemon=True)
    printing.start()
    code = child.wait()
    process_tree.end_descendants(END_SECONDS)
    printing.join(END_SECONDS)
    reporter.tell("ended", order.rank, code)
    return 0


def _start(order: Order, output: int) -> subprocess.Popen[bytes]:
    """Local: the rank, in a session of its own, which this process cannot leave behind."""
    me = os.getpid()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.Popen(
        order.words,
        env={**environment, **order.environment},
        cwd=order.directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        start_new_session=True,
        preexec_fn=lambda: process_tree.die_with_parent(signal.SIGKILL, me),  # noqa: PLW1509 (there are no threads yet)
    )


def _terminal() -> tuple[int, int]:
    """Local: both ends of a terminal for what the rank prints, so that each line comes when it is complete.

    So does mpirun for the ranks of its own host.
    """
    terminal, output = pty.openpty()
    tty.setraw(output)
    return terminal, output


def _hand_on(terminal: int) -> None:
    """Local: print what the rank prints, until nobody can print there any more."""
    with contextlib.suppress(OSError):  # all that had the other end are gone; or nobody listens here
        while data := os.read(terminal, CHUNK_BYTES):
            while data:
                data = data[os.write(1, data) :]


def _listen(coming: Iterator[bytes], child: subprocess.Popen[bytes]) -> None:
    """Local: hand signals on; at the end of the connection end the rank."""
    for line in coming:
        if line.isdigit():
            with contextlib.suppress(OSError):
                os.killpg(child.pid, int(line))
    while found := process_tree.descendants(os.getpid()):
        process_tree.signal_all(found, signal.SIGKILL)
        time.sleep(0.02)
    os._exit(NOT_STARTED)


if __name__ == "__main__":
    sys.exit(main())
