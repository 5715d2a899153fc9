"""Short messages between ranks beside MPI: lines of JSON over TCP, from those who know the job's token.

Nothing that arrives can run code. What is not a line of JSON of sensible length closes the connection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
LONGEST_BYTES = 1 << 20
MOST_UNSENT_BYTES = 4 << 20
MOVED: Message = {"is": "moved"}  # the last word of a rank that lives, and looks for another hub
SIOCGIFADDR = 0x8915


class Link:
    """One connection, that never blocks.

    Args:
        connection: connected.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Local: send as much as goes; the rest leaves with later calls.

        Raises:
            ConnectionError: the other end is gone, or has not read for long.
        """
        self._unsent += json.dumps(message).encode() + b"\n"
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
            except OSError as error:
                raise ConnectionError(str(error)) from error
            self._received += data
            if not data or len(self._received) > LONGEST_BYTES:
                ended = True
                break
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if ended and not lines:
            raise ConnectionError("closed")
        return [_message(line) for line in lines]

    def close(self) -> None:
        """Local: close the connection."""
        self.socket.close()


def _message(line: bytes) -> Message:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConnectionError("not a message") from error
    if not isinstance(found, dict) or not isinstance(found.get("is"), str):
        raise ConnectionError("not a message")
    return found


def listen(one_host: bool, backlog: int) -> socket.socket:
    """Local: a listening socket on a free port, for this host alone where all ranks are on it."""
    return socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=max(16, backlog))


def addresses(one_host: bool, environ: Mapping[str, str]) -> list[str]:
    """Local: IPv4 addresses at which other ranks may reach this one; those that MPI was told to use stand first."""
    if one_host:
        return ["127.0.0.1"]
    wanted = ",".join(environ.get(name, "") for name in ("OMPI_MCA_btl_tcp_if_include", "HYDRA_IFACE", "FI_TCP_IFACE"))
    found: list[tuple[bool, str]] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    found.append((not _is_wanted(name, address, wanted), address))
    return [address for _, address in sorted(found)] or [socket.gethostname()]


def _is_wanted(name: str, address: str, wanted: str) -> bool:
    """Whether an interface is named in a list such as `eth0,10.0.0.0/8`; of a network the first bytes do."""
    for part in filter(None, wanted.split(",")):
        network, slash, bits = part.partition("/")
        prefix = ".".join(network.split(".")[: int(bits) // 8]) if slash and bits.isdigit() else None
        if part == name or (prefix is not None and f"{address}.".startswith(f"{prefix}.")):
            return True
    return False


def proof(token: str, speaker: int, listener: int) -> str:
    """Local: what only a rank of the job can say; the token itself never travels."""
    return hmac.digest(token.encode(), f"{speaker} to {listener}".encode(), "sha256").hex()


def is_proof(given: Any, token: str, speaker: int, listener: int) -> bool:
    """Local: compare in a time that tells nothing."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(token, speaker, listener).encode())


def greet(connection: socket.socket, own: int, to: int, hello: Message, token: str, timeout_seconds: float) -> Link:
    """Local: be welcomed by the rank that is expected at the other end. Blocks for `timeout_seconds` at most.

    Args:
        connection: connected; closed when this raises.
        own: this rank.
        to: the rank that is expected there.
        hello: more about this rank.
        token: of the job.
        timeout_seconds: for the answer.

    Raises:
        TimeoutError: there is no answer.
        OSError: somebody else answers, or nobody any more.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        words = {**hello, "is": "hello", "rank": own, "to": to, "proof": proof(token, own, to)}
        connection.settimeout(timeout_seconds)
        connection.sendall(json.dumps(words).encode() + b"\n")
        line = bytearray()
        while not line.endswith(b"\n"):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(1)  # no more than the welcome: what follows belongs to the link
            if not data or len(line) > 1000:
                raise ConnectionError("not welcome")
            line += data
        if not is_proof(_message(bytes(line)).get("proof"), token, to, own):
            raise ConnectionError("another rank, or another job")
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


def is_refused(error: OSError) -> bool:
    """Local: whether the host answers, but nobody listens: the process has ended."""
    return error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)


def new_token() -> str:
    """Local: for one job; whoever knows it may speak."""
    return os.urandom(16).hex()


def first_that_answers(
    places: Sequence[tuple[str, int]], own: int, to: int, hello: Message, token: str, timeout_seconds: float
) -> Link | str:
    """Local: try the addresses of one rank, one after the other.

    Returns:
        A link; else `closed` (nobody listens there any more), `silent` (connected, no answer) or `unreachable`.
    """
    why = "unreachable"
    for place in places:
        try:
            connection = socket.create_connection(place, timeout_seconds)
        except OSError as error:
            why = "closed" if is_refused(error) else why
            continue
        try:
            return greet(connection, own, to, hello, token, timeout_seconds)
        except TimeoutError:
            why = "silent"
        except OSError as error:
            why = "closed" if is_refused(error) else why
    return why
