"""Lets ranks in, and nobody else: what strangers send, or do not send, costs the job next to nothing.

Before a caller has shown that it knows the job's token it gets `GREETING_SECONDS`, a few KiB and one of a few places;
where these are taken, the one that has kept its place for longest gives it up. A rank needs milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpitrain.faults import handshake
from mpitrain.faults.wire import Link, Message

GREETING_SECONDS = 1.5
FEWEST_PLACES = 64  # and one for each rank
TURN_SECONDS = 0.5  # in which there are as many connections made as there are places; the others wait

Selector = selectors.BaseSelector
Welcome = Callable[[Link, Message], None]  # takes a new link and its first words


@dataclass
class Caller:
    """Somebody who has not said who it is."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Acceptor:
    """Listens, on the watchdog's thread.

    Args:
        listeners: that listen.
        selector: of the thread; what it finds readable is called.
        welcome: takes the first words of a rank of this job; raises ConnectionError if it does not want it.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], token: str, ranks: int, selector: Selector, welcome: Welcome
    ) -> None:
        self._listeners, self._token, self._selector, self._welcome = listeners, token, selector, welcome
        self._most = FEWEST_PLACES + ranks
        self._callers: dict[int, Caller] = {}  # by descriptor, the oldest first
        self._turn, self._made = 0.0, 0
        self._is_open = False
        for listener in listeners:
            listener.setblocking(False)
        self._open()

    def tick(self) -> None:
        """Local: called about twice a second: send those away who have said nothing, and take others."""
        moment = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.deadline <= moment]:
            self._send_away(caller)
        if moment - self._turn >= TURN_SECONDS:
            self._turn, self._made = moment, 0
            self._open()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, lambda one=listener: self._accept(one))

    def _pause(self) -> None:
        """Local: until the next turn callers wait in the kernel."""
        if self._is_open:
            self._is_open = False
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        if not self._is_open:
            return
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # The caller stays in the kernel's queue, so that the selector would find the listener readable at once, for
            # ever.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause()
            return
        self._made += 1
        if self._made >= self._most:
            self._pause()
        if len(self._callers) >= self._most:
            self._send_away(next(iter(self._callers.values())))
        caller = Caller(connection, handshake.new_nonce(), time.monotonic() + GREETING_SECONDS)
        self._callers[connection.fileno()] = caller
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(caller))
        with contextlib.suppress(OSError):
            connection.send(caller.nonce + b"\n")

    def _hear(self, caller: Caller) -> None:
        if caller.socket.fileno() < 0:
            return  # sent away a moment ago
        try:
            data = caller.socket.recv(handshake.LONGEST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        caller.received += data
        line, newline, rest = bytes(caller.received).partition(b"\n")
        if newline and data:
            self._judge(caller, line, rest)
        elif not data or len(caller.received) > handshake.LONGEST_BYTES:
            self._send_away(caller)

    def _judge(self, caller: Caller, line: bytes, rest: bytes) -> None:
        try:
            hello = handshake.opened(line, self._token, caller.nonce)
            del self._callers[caller.socket.fileno()]
            self._selector.unregister(caller.socket)
            self._welcome(Link(caller.socket, rest), hello)
        except (ConnectionError, ValueError, TypeError):
            self._send_away(caller)

    def _send_away(self, caller: Caller) -> None:
        self._callers.pop(caller.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.socket)
        caller.socket.close()
