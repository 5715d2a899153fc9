"""The addresses of this host by which the ranks of a job reach each other beside MPI, and sockets that listen there."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

LOOPBACK = "127.0.0.1"
# Where Open MPI, MPICH and Intel MPI are told which network to use.
MPI_VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "HYDRA_IFACE", "FI_TCP_IFACE", "UCX_NET_DEVICES")
SIOCGIFADDR = 0x8915  # linux/sockios.h


def addresses(environ: Mapping[str, str]) -> list[str]:
    """Local: IPv4 addresses of this host but the loopback's; those that MPI was told to use stand first."""
    wanted = _wanted(environ)
    found = sorted((not _is_wanted(name, address, wanted), address) for name, address in _interfaces())
    return [address for _, address in found] or [socket.gethostname()]


def offered(environ: Mapping[str, str]) -> list[str]:
    """Local: the addresses that other hosts may use: those of the interfaces that MPI was told to use, else all."""
    wanted = _wanted(environ)
    return [address for name, address in _interfaces() if _is_wanted(name, address, wanted)] or addresses(environ)


def used(own: Sequence[str], others: Sequence[Sequence[str]]) -> list[str]:
    """Local: those of this host's addresses that the ways to the other hosts begin at, as the kernel chooses them.

    Args:
        own: of this host.
        others: what each rank has offered. An address that this host has, too (a bridge of containers has the same
            one everywhere), leads nowhere.
    """
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for address in {address for offer in others for address in offer} - set(own):
            with contextlib.suppress(OSError):
                probe.connect((address, 9))  # sends nothing
                found.add(probe.getsockname()[0])
    return [address for address in own if address in found] or list(own)


def listen(places: Sequence[str], backlog: int) -> list[socket.socket]:
    """Local: listening sockets on a free port of each address.

    Raises:
        OSError: there is none.
    """
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server((place, 0), backlog=backlog)) for place in places]
        stack.pop_all()
    return made


def _wanted(environ: Mapping[str, str]) -> list[str]:
    return [part for name in MPI_VARIABLES for part in environ.get(name, "").split(",") if part]


def _interfaces() -> Iterator[tuple[str, str]]:
    """Names and IPv4 addresses, without the loopback's."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                # `struct ifreq`: 16 bytes of name, then a `sockaddr_in`, whose address follows family and port.
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    yield name, address


def _is_wanted(name: str, address: str, wanted: Sequence[str]) -> bool:
    """Whether an interface is named in a list such as `eth0, 10.0.0.0/8`."""
    for part in wanted:
        with contextlib.suppress(ValueError):
            if part == name or ipaddress.ip_address(address) in ipaddress.ip_network(part, strict=False):
                return True
    return False
