"""Who may connect: the filter, run here by a small interpreter, and by the kernel on real sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpitrain.cluster import network
from mpitrain.cluster.network import Instruction, choose, parse, program, reserve, restrict, strangers
from mpitrain.cluster.server import Access
from mpitrain.errors import UsageError


def passes(lines: Sequence[Instruction], sender: str) -> bool:
    """Runs a filter, as linux/filter.h defines it, on an IP header from an address."""
    address = ipaddress.ip_address(sender)
    header = bytearray(40)
    header[0] = address.version << 4
    start = network.SOURCE[address.version]
    header[start : start + len(address.packed)] = address.packed
    value, place = 0, 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        at = operand - (network.NETWORK_HEADER & network.ALL_BYTES)
        if code == network.LOAD_BYTE:
            value = header[at]
        elif code == network.LOAD_WORD:
            value = int.from_bytes(header[at : at + 4], "big")
        elif code == network.SHIFT_RIGHT:
            value >>= operand
        elif code == network.AND:
            value &= operand
        elif code == network.JUMP_IF_EQUAL:
            place += if_true if value == operand else if_false
        else:
            assert code == network.RETURN
            return operand != 0


@pytest.mark.parametrize(
    ("networks", "inside", "outside"),
    [
        ("127.0.0.0/8,::1/128", ["127.0.0.1", "127.9.9.9", "::1"], ["128.0.0.1", "10.0.0.1", "::2", "fe80::1", "::"]),
        ("10.77.0.0/24", ["10.77.0.0", "10.77.0.255"], ["10.77.1.0", "10.76.0.1", "127.0.0.1", "::1"]),
        ("10.77.0.3", ["10.77.0.3"], ["10.77.0.2", "10.77.0.4"]),
        ("10.77.0.9/24", ["10.77.0.3"], ["10.78.0.3"]),
        ("10.0.0.0/8, 192.168.1.128/25", ["10.3.2.1", "192.168.1.200"], ["192.168.1.100", "11.0.0.1"]),
        ("fd00:1:2::/48", ["fd00:1:2:ffff::1"], ["fd00:1:3::1", "10.0.0.1"]),
        ("fd00::/7", ["fc00::1", "fdff::1"], ["fe00::1"]),
        ("0.0.0.0/0", ["1.2.3.4"], ["::1"]),
        ("::/0", ["::1"], ["1.2.3.4"]),
        (",".join(f"10.0.{part}.0/24" for part in range(60)), ["10.0.59.1", "10.0.0.1"], ["10.0.60.1", "::1"]),
    ],
)
def test_the_filter(networks: str, inside: list[str], outside: list[str]) -> None:
    lines = program(parse(networks))
    assert [address for address in inside if not passes(lines, address)] == []
    assert [address for address in outside if passes(lines, address)] == []


def test_too_many_networks() -> None:
    with pytest.raises(UsageError, match="64 networks; 63 at most"):
        program(parse(",".join(f"10.0.{part}.0/24" for part in range(64))))


@pytest.mark.parametrize("text", ["", "eth0", "10.0.0.0/33", "10.0.0", "10.0.0.1,"])
def test_no_network(text: str) -> None:
    with pytest.raises(UsageError, match="expected networks or addresses"):
        parse(text)


def connects(port: int, source: str) -> bool:
    """Whether somebody with this address of the loopback interface gets through."""
    with socket.socket() as client:
        client.settimeout(0.3)
        client.bind((source, 0))
        try:
            client.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
        return True


def test_the_kernel_obeys() -> None:
    listening = [socket.create_server(("", 0)), socket.create_server(("", 0))]
    port, other = (one.getsockname()[1] for one in listening)
    try:
        assert connects(port, "127.0.0.2")
        assert restrict(port, parse("127.1.0.0/16")) == 1
        assert connects(port, "127.1.0.2")
        assert not connects(port, "127.0.0.2")
        assert connects(other, "127.0.0.2")
    finally:
        for one in listening:
            one.close()
    assert restrict(port, parse("127.1.0.0/16")) == 0


def test_strangers() -> None:
    with socket.create_server(("", 0)) as listening, socket.socket() as client:
        port = listening.getsockname()[1]
        client.bind(("127.3.0.1", 0))
        client.connect(("127.0.0.1", port))
        assert strangers(port, parse("127.0.0.0/16")) == ["127.3.0.1"]
        assert strangers(port, parse("127.0.0.0/8")) == []
        assert strangers(1, ()) == []


@pytest.mark.skipif(sys.byteorder != "little", reason="the lines are of such a machine")
def test_strangers_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    line = "  0: {here}:08AE {there}:C000 {state} 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
    (tmp_path / "net/tcp").write_text("head\n" + line.format(here="0100007F", there="0200024D", state="0A"))
    mapped, own = "0000000000000000FFFF00000300000A", "000000FD000000000000000001000000"
    lines = [line.format(here="0" * 32, there=there, state="01") for there in (mapped, own)]
    (tmp_path / "net/tcp6").write_text("head\n" + "".join(lines))
    assert strangers(0x8AE, (), tmp_path) == ["10.0.0.3", "fd00::1"]
    assert strangers(0x8AE, parse("10.0.0.0/8"), tmp_path) == ["fd00::1"]


def test_a_reserved_port_is_for_one_listener() -> None:
    with reserve() as held:
        port = held.getsockname()[1]
        with socket.socket(socket.AF_INET6) as server:  # as gRPC does
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("::", port))
            server.listen()
            with pytest.raises(UsageError, match=f"port {port} on .* is taken: give another --port"):
                reserve(port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))


@pytest.mark.parametrize(
    ("bind", "insecure", "hosts", "told"),
    [
        (None, False, 1, "for this host alone"),
        (None, True, 1, "for everybody who reaches this network"),
        (None, True, 3, "for everybody who reaches this network"),
        ("10.0.0.0/8", True, 3, "for everybody who reaches this network"),
        ("10.0.0.7/8,fd00::1", False, 3, "for hosts in 10.0.0.0/8, fd00::1/128"),
    ],
)
def test_access(bind: str | None, insecure: bool, hosts: int, told: str) -> None:
    assert str(Access.of(bind, insecure, hosts)) == told


def test_several_hosts_need_a_word() -> None:
    with pytest.raises(UsageError, match=r"on 2 hosts, and .* no password.*--bind .*--insecure-network"):
        Access.of(None, False, 2)


def test_the_address_is_in_the_network() -> None:
    own = ["172.17.0.1", "10.1.0.5", "name"]
    assert choose(own, parse("10.0.0.0/8")) == "10.1.0.5"
    with pytest.raises(UsageError, match=f"{os.uname().nodename} has no address in 192.168.0.0/16 .*172.17.0.1"):
        choose(own, parse("192.168.0.0/16"))
