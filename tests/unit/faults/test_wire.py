"""Messages between ranks."""

from __future__ import annotations

import socket

import pytest

from mpitrain.faults import wire


def pair() -> tuple[wire.Link, wire.Link]:
    left, right = socket.socketpair()
    return wire.Link(left), wire.Link(right)


def test_messages_arrive_whole() -> None:
    left, right = pair()
    messages = [{"is": "state", "text": "x" * 100_000}, {"is": "beat"}]
    received: list[wire.Message] = []
    for message in messages:
        left.send(message)
    while len(received) < 2:
        left.flush()
        received += right.receive()
    assert received == messages
    left.close()
    with pytest.raises(ConnectionError):
        right.receive()


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"is": 3}\n', b"\x80\x04K\x01.\n", b"x" * (2 << 20)]
)
def test_junk_closes_the_connection(junk: bytes) -> None:
    left, right = socket.socketpair()
    link = wire.Link(right)
    left.setblocking(False)
    with pytest.raises(ConnectionError):
        send_and_receive(left, link, junk)
    link.close()
    left.close()


def send_and_receive(left: socket.socket, link: wire.Link, content: bytes) -> None:
    while content:
        content = content[left.send(content) :]
        link.receive()
    left.shutdown(socket.SHUT_WR)
    link.receive()
