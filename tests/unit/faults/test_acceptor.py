"""What reaches a port of the watchdog from those who do not know the job's token: it costs next to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.faults import acceptor, handshake, interfaces
from mpitrain.faults.acceptor import Acceptor
from mpitrain.faults.wire import Link, Message

TOKEN = "secret"
PLACES = acceptor.FEWEST_PLACES + 2
NESTED = b"[" * 200_000 + b"\n"
DEEP = b'{"a":' * 700


class Door:
    """A rank's port, served by a thread as the watchdog's; it takes ranks 0 and 1."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.ranks: list[Message] = []
        self.links: list[Link] = []
        self.failed: BaseException | None = None
        self.stopped = False
        (listener,) = self.listeners = interfaces.listen([interfaces.LOOPBACK], 256)
        self.place: tuple[str, int] = listener.getsockname()
        self.acceptor = Acceptor(self.listeners, TOKEN, 2, self.selector, self.welcome)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def welcome(self, link: Link, hello: Message) -> None:
        if hello.get("to") != 0:
            raise ConnectionError
        self.ranks.append(hello)
        self.links.append(link)
        link.send_line(handshake.sealed({"is": "welcome", "rank": 0}, TOKEN, str(hello["nonce"]).encode()))

    def serve(self) -> None:
        try:
            while not self.stopped:
                self.acceptor.tick()
                for key, _ in self.selector.select(0.05):
                    key.data()
        except BaseException as error:  # in the watchdog it would end the job
            self.failed = error

    def close(self) -> None:
        self.stopped = True
        self.thread.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        for link in self.links:
            link.close()
        for listener in self.listeners:
            listener.close()
        self.selector.close()
        assert self.failed is None

    def call(self) -> socket.socket:
        """A stranger's connection; it has been told the nonce."""
        connection = socket.create_connection(self.place, 5)
        assert len(connection.recv(100)) == 2 * handshake.NONCE_BYTES + 1
        return connection

    def lets_a_rank_in(self) -> bool:
        link = handshake.first_that_answers([self.place], 1, 0, {"left": {}}, TOKEN, 5.0)
        if isinstance(link, Link):
            link.close()
        return isinstance(link, Link)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door()
    yield opened
    opened.close()


def is_closed(connection: socket.socket, seconds: float = 10.0) -> bool:
    """Whether the other end closes, within that time."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except ConnectionError:
        return  # closed meanwhile


HELLO = {"is": "hello", "rank": 1, "to": 0, "nonce": "0"}
JUNK = {
    "brackets": NESTED,
    "deep objects": DEEP + b"\n",
    "no end of line": b"x" * (1 << 20),
    "many lines": b"{}\n" * (1 << 18),
    "nothing but lines": b"\n" * 100,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c403037f") + os.urandom(200) + b"\n",
    "a pickle": b"\x80\x04K\x01.\n",
    "no proof": json.dumps(HELLO).encode() + b"\n",
    "a wrong proof": b"0" * 64 + b" " + json.dumps(HELLO).encode() + b"\n",
    "brackets behind a wrong proof": b"0" * 64 + b" " + NESTED,
    "of another job": handshake.sealed(HELLO, "other", b"0" * 32),
    "a number of 5000 digits": b'{"is":"hello","rank":' + b"9" * 5000 + b"}\n",
    "half a character": b'{"is":"hello","proof":"\\ud800"}\n',
    "not UTF-8": b"\xff\xfe\x00\n",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_closes_its_connection_and_nothing_else(door: Door, junk: bytes) -> None:
    with door.call() as connection:
        send(connection, junk)
        assert is_closed(connection)
    assert door.lets_a_rank_in()
    assert len(door.ranks) == 1


def test_any_bytes(door: Door) -> None:
    parts = st.sampled_from([b"[", b'{"is":', b"\n", b" ", b"0" * 64, b'{"is":"hello"}', b"9" * 50, b"\\ud800"])

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.binary(max_size=100) | parts | parts.map(lambda part: part * 300), max_size=12).map(b"".join))
    def one(content: bytes) -> None:
        with door.call() as connection:
            send(connection, content + b"\n")
            assert is_closed(connection)

    one()
    assert door.failed is None
    assert door.ranks == []
    assert door.lets_a_rank_in()


def test_what_was_overheard_is_of_no_use(door: Door) -> None:
    with door.call() as connection:
        overheard = handshake.sealed(HELLO, TOKEN, b"0" * 32)  # for the nonce of another connection
        send(connection, overheard)
        assert is_closed(connection)
    assert door.ranks == []


def test_whoever_says_nothing_or_too_slowly_is_sent_away(door: Door) -> None:
    began = time.monotonic()
    with door.call() as idle, door.call() as slow:
        for letter in b'{"is":"hello"':
            send(slow, bytes([letter]))
            time.sleep(0.2)
        assert is_closed(slow)
        assert is_closed(idle)
    assert time.monotonic() - began >= acceptor.GREETING_SECONDS
    assert door.lets_a_rank_in()


def test_connections_that_end_at_once(door: Door) -> None:
    for _ in range(20):
        connection = socket.create_connection(door.place, 5)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # with a reset
    assert door.lets_a_rank_in()


def test_many_idle_connections_take_a_few_places_only(door: Door) -> None:
    before = descriptors()
    connections = []
    most = 0
    try:
        for _ in range(200):
            connections.append(socket.create_connection(door.place, 30))
            most = max(most, descriptors() - before - len(connections))
        assert door.lets_a_rank_in()
    finally:
        for connection in connections:
            connection.close()
    assert 1 < most <= PLACES + 1  # one that is being exchanged for another


def test_a_process_without_descriptors_goes_on(door: Door) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller:
        caller.settimeout(30)
        kept = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    kept.append(os.dup(0))
            caller.connect(door.place)  # waits in the kernel
            used = time.process_time()
            time.sleep(1.0)
            assert time.process_time() - used < 0.5  # nor does it try again and again
        finally:
            for descriptor in kept:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caller.recv(100)  # let in after all
    assert door.lets_a_rank_in()


def test_a_rank_that_is_sent_away_is_not_taken_for_dead() -> None:
    """A connection that breaks is tried again; only a port where nobody listens is that of a process that has ended."""
    with socket.create_server((interfaces.LOOPBACK, 0)) as listener:
        place = listener.getsockname()

        def break_off() -> None:
            for _ in range(handshake.CALLS):
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        thread = threading.Thread(target=break_off)
        thread.start()
        assert handshake.first_that_answers([place], 1, 0, {}, TOKEN, 5.0) == "silent"
        thread.join()
