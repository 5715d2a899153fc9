"""How two ranks find out that both know the job's token, before either reads anything of the other.

Whoever listens says a number that was never used before; whoever calls answers with its words, sealed with the token
and that number, and with a number of its own; the welcome is sealed with that. The token itself never travels, what
was overheard is of no use a second time, and what is not sealed is not even taken apart.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
import time
from collections.abc import Sequence

from mpitrain.faults.wire import MOVED, Link, Message, decoded

NONCE_BYTES = 16
LONGEST_BYTES = 4096  # of a line before the other end is known: what a rank says of ten others

CALLS, PAUSE_SECONDS = 3, 0.05  # where a connection breaks at once: its process ends, or takes no more just now


def new_token() -> str:
    """Local: for one job; whoever knows it may speak."""
    return os.urandom(NONCE_BYTES).hex()


def new_nonce() -> bytes:
    """Local: for one connection."""
    return os.urandom(NONCE_BYTES).hex().encode()


def sealed(message: Message, token: str, nonce: bytes) -> bytes:
    """Local: a line that only one who knows the token can write, and only for this nonce."""
    body = json.dumps(message).encode()
    return _seal(token, nonce, body) + b" " + body + b"\n"


def opened(line: bytes, token: str, nonce: bytes) -> Message:
    """Local: what was sealed; nothing else is taken apart.

    Raises:
        ConnectionError: it was not sealed with this token and nonce.
    """
    seal, _, body = line.partition(b" ")
    if not hmac.compare_digest(seal, _seal(token, nonce, body)):
        raise ConnectionError("not of this job")
    return decoded(body)


def _seal(token: str, nonce: bytes, body: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce + b" " + body, "sha256").hex().encode()


def greet(connection: socket.socket, own: int, to: int, hello: Message, token: str, timeout_seconds: float) -> Link:
    """Local: be welcomed by the rank that is expected at the other end. Blocks for `timeout_seconds` at most.

    Closes the connection when it raises.

    Raises:
        TimeoutError: there is no answer.
        OSError: somebody else answers, or nobody any more.
    """
    deadline, nonce = time.monotonic() + timeout_seconds, new_nonce()
    try:
        # `to`: an address and port may by now be another rank's.
        words = {**hello, "is": "hello", "rank": own, "to": to, "nonce": nonce.decode()}
        asked = _line(connection, deadline)
        connection.sendall(sealed(words, token, asked))
        welcome = opened(_line(connection, deadline), token, nonce)
        if (welcome["is"], welcome.get("rank")) != ("welcome", to):
            raise ConnectionError("another rank")
        return Link(connection)
    except TimeoutError:
        # The other end may read all this later, and must not take this rank for dead.
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(json.dumps(MOVED).encode() + b"\n")
        connection.close()
        raise
    except BaseException:
        connection.close()
        raise


def _line(connection: socket.socket, deadline: float) -> bytes:
    """Local: one line and no more: what follows belongs to the link."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        data = connection.recv(1)
        if not data or len(line) > LONGEST_BYTES:
            raise ConnectionError("not welcome")
        line += data
    return bytes(line[:-1])


def first_that_answers(
    places: Sequence[tuple[str, int]], own: int, to: int, hello: Message, token: str, timeout_seconds: float
) -> Link | str:
    """Local: try the addresses of one rank, one after the other.

    Returns:
        A link; else `closed` (nobody listens there any more), `silent` (connected, no answer) or `unreachable`.
    """
    why = "unreachable"
    for place in places:
        found: Link | str = "broken"
        for call in range(CALLS):
            if found == "broken":
                time.sleep(PAUSE_SECONDS * call)
                found = _call(place, own, to, hello, token, timeout_seconds)
        if isinstance(found, Link):
            return found
        why = {"broken": "silent", "unreachable": why}.get(found, found)
    return why


def _call(place: tuple[str, int], own: int, to: int, hello: Message, token: str, timeout_seconds: float) -> Link | str:
    """Local: one attempt; only where nobody listens the process has ended."""
    try:
        connection = socket.create_connection(place, timeout_seconds)
    except ConnectionResetError:
        return "broken"
    except OSError as error:
        return "closed" if error.errno == errno.ECONNREFUSED else "unreachable"
    try:
        return greet(connection, own, to, hello, token, timeout_seconds)
    except TimeoutError:
        return "silent"
    except OSError:
        return "broken"
