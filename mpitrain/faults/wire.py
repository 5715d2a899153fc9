"""Short messages between ranks beside MPI: lines of JSON over TCP, from those who know the job's token.

Nothing that arrives can run code. What is not a line of JSON of sensible length closes the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]
LONGEST_BYTES = 1 << 20
MOST_UNSENT_BYTES = 4 << 20
MOVED: Message = {"is": "moved"}  # the last word of a rank that lives, and looks for another hub


class Link:
    """One connection, that never blocks.

    Args:
        received: what has been read from it already.
    """

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            # Short messages, each of which is waited for: none is held back to be sent with the next.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._received = bytearray(received)
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Local: send as much as goes; the rest leaves with later calls.

        Raises:
            ConnectionError: the other end is gone, or has not read for long.
        """
        self.send_line(json.dumps(message).encode() + b"\n")

    def send_line(self, line: bytes) -> None:
        """Local: the same for a line that is written already."""
        self._unsent += line
        self.flush()
        if len(self._unsent) > MOST_UNSENT_BYTES:
            raise ConnectionError("the other end reads nothing")

    def flush(self) -> None:
        """Local: send what is left.

        Raises:
            ConnectionError: the other end is gone.
        """
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionError(str(error)) from error
            del self._unsent[:sent]

    def receive(self) -> list[Message]:
        """Local: the messages that have come.

        Raises:
            ConnectionError: the other end is gone, or speaks something else.
        """
        ended = False
        while True:
            try:
                data = self.socket.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""  # what has come before is read first
            self._received += data
            if not data or len(self._received) > LONGEST_BYTES:
                ended = True
                break
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        # The end is told at the next call, after what came before it.
        if ended and not lines:
            raise ConnectionError("closed")
        return [decoded(line) for line in lines]

    def close(self) -> None:
        """Local: close the connection."""
        self.socket.close()


def decoded(line: bytes) -> Message:
    """Local: the message that a line holds.

    Raises:
        ConnectionError: it holds none.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("not a message") from error
    if not isinstance(found, dict) or not isinstance(found.get("is"), str):
        raise ConnectionError("not a message")
    return found
