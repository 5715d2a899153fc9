"""Who is let in, and how."""

from __future__ import annotations

import socket

import pytest

from mpitrain.faults import handshake, wire


def pair() -> tuple[wire.Link, wire.Link]:
    left, right = socket.socketpair()
    return wire.Link(left), wire.Link(right)


def test_only_what_is_sealed_with_the_token_for_this_connection_is_believed() -> None:
    nonce = handshake.new_nonce()
    line = handshake.sealed({"is": "hello", "rank": 1}, "secret", nonce)
    assert handshake.opened(line[:-1], "secret", nonce) == {"is": "hello", "rank": 1}
    assert b"secret" not in line
    for token, other, text in (
        ("other", nonce, line[:-1]),
        ("secret", handshake.new_nonce(), line[:-1]),  # overheard, and said again
        ("secret", nonce, line[:-1].replace(b"1}", b"2}")),
        ("secret", nonce, line[65:-1]),
        ("secret", nonce, b""),
    ):
        with pytest.raises(ConnectionError):
            handshake.opened(text, token, other)


def test_a_port_where_nobody_listens_or_answers() -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    assert handshake.first_that_answers([("127.0.0.1", port)], 1, 0, {}, "t", 0.3) == "silent"
    closed.close()
    assert handshake.first_that_answers([("127.0.0.1", port)], 1, 0, {}, "t", 0.3) == "closed"
    assert handshake.first_that_answers([], 1, 0, {}, "t", 0.3) == "unreachable"
