"""Who may reach a server. TensorFlow's gRPC asks nobody for a name or a password, and listens on all addresses.

It cannot be told to listen on one address only. So the kernel is told: a filter on the listening sockets drops what
does not come from an allowed network, before a connection exists. Any user may attach one (Linux, `man 7 socket`,
SO_ATTACH_FILTER); connections that are accepted inherit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import UsageError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
THIS_HOST: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# linux/bpf_common.h and linux/filter.h: load a word or a byte, shift, mask, jump if equal, return.
LOAD_WORD, LOAD_BYTE, SHIFT_RIGHT, AND, JUMP_IF_EQUAL, RETURN = 0x20, 0x30, 0x74, 0x54, 0x15, 0x06
NETWORK_HEADER = -0x100000  # offsets from here count from the beginning of the IP header
SOURCE = {4: 12, 6: 8}  # where the sender's address stands in it
ALL_BYTES = 0xFFFFFFFF
LONGEST_JUMP = 255
MOST_PORT = 65535
ESTABLISHED = "01"  # in /proc/net/tcp

Instruction = tuple[int, int, int, int]  # code, how many to skip if true, if false, operand


def parse(text: str) -> tuple[Network, ...]:
    """Local: networks or addresses, as in `10.0.0.0/24,192.168.1.7`.

    Raises:
        UsageError: it is none.
    """
    try:
        return tuple(ipaddress.ip_network(part.strip(), strict=False) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--bind {text!r}: expected networks or addresses, such as 10.0.0.0/24: {error}") from None


def choose(addresses: Sequence[str], networks: Sequence[Network]) -> str:
    """Local: which of a host's own addresses the others are to use.

    The best of the addresses come first.

    Raises:
        UsageError: none of them is in one of the networks.
    """
    for address in addresses:
        with contextlib.suppress(ValueError):
            if any(ipaddress.ip_address(address) in network for network in networks):
                return address
    named = ", ".join(map(str, networks))
    raise UsageError(
        f"{os.uname().nodename} has no address in {named} (--bind), but {', '.join(addresses)}: "
        "name the network that all hosts of the job are on"
    )


def program(networks: Sequence[Network]) -> list[Instruction]:
    """Local: a filter in the kernel's classic packet filter language that passes what comes from these networks.

    See McCanne and Jacobson, The BSD Packet Filter, 1993.

    Raises:
        UsageError: there are too many.
    """
    checks = {version: [_check(network) for network in networks if network.version == version] for version in SOURCE}
    ipv4 = [line for check in checks[4] for line in check] + [(RETURN, 0, 0, 0)]
    ipv6 = [line for check in checks[6] for line in check] + [(RETURN, 0, 0, 0)]
    if len(ipv4) > LONGEST_JUMP:
        raise UsageError(f"--bind: {len(checks[4])} networks; {LONGEST_JUMP // 4} at most")
    version = [  # the first four bits of an IP header
        (LOAD_BYTE, 0, 0, NETWORK_HEADER & ALL_BYTES),
        (SHIFT_RIGHT, 0, 0, 4),
        (JUMP_IF_EQUAL, 0, len(ipv4), 4),
    ]
    return [*version, *ipv4, *ipv6]


def _check(network: Network) -> list[Instruction]:
    """Pass if the sender is in this network, else go on behind."""
    words = network.max_prefixlen // 32
    base, mask = int(network.network_address), int(network.netmask)
    lines: list[Instruction] = []
    for word in range(words):
        shift = 32 * (words - 1 - word)
        wanted, bits = base >> shift & ALL_BYTES, mask >> shift & ALL_BYTES
        if bits:
            lines.append((LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE[network.version] + 4 * word & ALL_BYTES))
            lines.append((AND, 0, 0, bits))
            lines.append((JUMP_IF_EQUAL, 0, -1, wanted))
    lines.append((RETURN, 0, 0, ALL_BYTES))
    end = len(lines)
    return [
        (code, true, end - place - 1 if false < 0 else false, operand)
        for place, (code, true, false, operand) in enumerate(lines)
    ]


def restrict(port: int, networks: Sequence[Network]) -> int:
    """Local: let this process' listening sockets of a port be reached from these networks alone.

    Returns:
        To how many sockets it was done.

    Raises:
        OSError: the kernel does not take the filter.
    """
    lines = program(networks)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    option = struct.pack("@HP", len(lines), ctypes.addressof(code))
    done = 0
    for listening in _listening(port):
        with listening:
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)
        done += 1
    return done


def strangers(port: int, networks: Sequence[Network], proc: Path = Path("/proc")) -> list[str]:
    """Local: from where connections to a port exist that the filter would not have let through."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                _, here, there, state, *_ = line.split()
                sender = _address(there.partition(":")[0])
                if state == ESTABLISHED and int(here.partition(":")[2], 16) == port:
                    found += [] if any(sender in network for network in networks) else [str(sender)]
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc/net/tcp has it: words of 32 bits, each in the byte order of the machine."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _listening(port: int) -> list[socket.socket]:
    """Local: this process' TCP sockets that listen on a port, as copies, which the caller closes."""
    found: dict[str, socket.socket] = {}  # by the name of the socket, of which there may be copies already
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if not name.startswith("socket:") or name in found:
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
            internet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            if internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and copy.getsockname()[1] == port:
                found[name] = copy
            else:
                copy.close()
    return list(found.values())


def reserve(port: int = 0) -> socket.socket:
    """Local: keep a port from all others until TensorFlow listens there.

    Linux lets two sockets have the same port if both allow it (SO_REUSEADDR, as gRPC sets) and not both listen. Port 0
    stands for any.

    Raises:
        UsageError: it is taken, or there is no such port.
    """
    if not 0 <= port <= MOST_PORT:
        raise UsageError(f"port {port}: expected a number from 0 to {MOST_PORT} (--port, and the local rank)")
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
    except OSError as error:
        held.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UsageError(f"port {port} on {os.uname().nodename} {why}: give another --port") from error
    return held
