"""Ranks on several hosts that Open MPI 5 starts without daemons there: one by one, each by ssh (see `starter`).

mpirun ends a job when it loses the daemon of a host, whatever it is told (`src/mca/errmgr/dvm` of PRRTE 3). Without
daemons a host is lost like ranks are: what started them here ends, and those that are left go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import socket
import struct
import sys

from mpitrain.launch.request import Request
from mpitrain.runtime.hostfile import Host, render

STARTER = (sys.executable, "-m", "mpitrain.launch.daemonless.starter")
OPTIONS = (
    # Of this host alone, whatever a batch system has given.
    *("--prtemca", "ras", "^slurm,pbs,lsf,gridengine,flux", "--prtemca", "plm", "ssh"),
    # Ranks ask mpirun for each other's addresses over the network.
    *("--prtemca", "pmix_remote_connections", "1"),
    # To MPI all ranks are on this host. They share no memory.
    *("--mca", "btl", "tcp,self", "--mca", "osc", "^sm"),
)
# So that mpirun, too, gives its answers over the network and not in shared memory.
VARIABLES = {"PMIX_MCA_gds": "hash"}
INTERFACE_VARIABLE = "PMIX_MCA_ptl_base_if_include"
SIOCGIFADDR = 0x8915  # linux/sockios.h


def daemonless_request(request: Request, ssh: str) -> Request:
    """The same ranks, as processes of this host that start them."""
    # No options: mpirun takes some for its own, also behind the program's name (seen: Open MPI 5.0.11).
    words = [render(request.hosts, "list").strip(), request.map_by, ssh, ",".join(sorted(request.environment))]
    variables = dict(VARIABLES)
    interface = ",".join(request.interfaces) or interface_to(request.hosts)
    if interface:
        variables[INTERFACE_VARIABLE] = interface
    return dataclasses.replace(
        request,
        command=(*STARTER, *words, *request.command),
        hosts=(Host("localhost", request.ranks),),
        map_by="slot",
        environment={**variables, **request.environment},
        extra=(*OPTIONS, *request.extra),
    )


def interface_to(hosts: tuple[Host, ...]) -> str | None:
    """Local: the network interface by which other hosts are reached; None if that cannot be seen.

    mpirun would listen on the first one that it finds, which may lead elsewhere.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for host in hosts:
            with contextlib.suppress(OSError):
                probe.connect((host.name, 9))  # sends nothing
                name = _interface_of(probe, socket.inet_aton(probe.getsockname()[0]))
                if name is not None:
                    return name
    return None


def _interface_of(probe: socket.socket, address: bytes) -> str | None:
    """Local: the interface that has an address, other than that of this host to itself."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if answer[20:24] == address and not address.startswith(b"\x7f"):
                return name
    return None
