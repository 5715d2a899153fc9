"""What is known of a host, as its agent told: the subject of all judgements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network
from typing import Any

from mpitrain.launch.dialect import Mpi, recognise
from mpitrain.runtime.devices import visible

# Bridges, and the ends of virtual cables, that containers and virtual machines of one host talk over: the same
# address on every host, and no way from one to another.
INSIDE_ONE_HOST = ("docker", "br-", "virbr", "veth", "lxcbr", "lxdbr", "podman", "cni", "nerdctl", "vmnet")


@dataclass(frozen=True)
class Python:
    """The interpreter that a rank would be run by."""

    version: str
    executable: str
    prefix: str


@dataclass(frozen=True)
class Package:
    """The mpitrain that this interpreter finds; `digest` is that of its sources."""

    version: str
    path: str
    digest: str
    machine_code: bool = True  # whether it was built there
    engine: str = "auto"  # MPITRAIN_ENGINE there


@dataclass(frozen=True)
class Launcher:
    """An mpirun."""

    path: str  # where it is
    version: str  # what it says of itself
    in_path: bool  # whether it is found by PATH
    beside_python: bool  # whether it is in the folder of the interpreter
    ulfm: bool = False  # whether its MPI can go on after the loss of a rank

    @property
    def mpi(self) -> Mpi | None:
        """Whose it is."""
        return recognise(self.version)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; its speed is known for real ones only, in Mbit/s."""

    name: str
    address: str
    mask: str
    loopback: bool = False
    running: bool = True
    bridge: bool = False
    speed_mbit: int | None = None

    @property
    def network(self) -> IPv4Network:
        """The addresses that are reached through it without a router."""
        return IPv4Interface(f"{self.address}/{self.mask}").network

    @property
    def leads_out(self) -> bool:
        """Whether another host may be behind it."""
        return self.running and not self.loopback and not self.name.startswith(INSIDE_ONE_HOST)


@dataclass(frozen=True)
class Graphics:
    """GPUs."""

    cards: tuple[str, ...] = ()  # of each that the driver shows: name, driver version, memory
    driver: str = ""  # version of the kernel's NVIDIA driver; empty without one
    devices: int = 0  # device files that may be opened
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    build: Mapping[str, str] = field(default_factory=dict)  # TensorFlow's build information
    cudnn: bool = False  # whether the system has NVIDIA's library of that name

    @property
    def usable(self) -> int:
        """How many GPUs ranks may use: what CUDA_VISIBLE_DEVICES leaves of the device files."""
        if self.visible is None:
            return self.devices
        return len(visible({"CUDA_VISIBLE_DEVICES": self.visible}, ()).devices)


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of the one here, within the error that the way there and back allows."""

    ahead_seconds: float
    error_seconds: float


@dataclass(frozen=True)
class Facts:
    """One host. See `agent.facts`."""

    name: str  # what the host calls itself
    root: bool  # whether ranks would run as root
    python: Python  # the interpreter
    packages: Mapping[str, str]  # version of each installed package
    mpitrain: Package | None  # None where there is none
    mpi_library: str  # what the MPI loaded by mpi4py says of itself
    mpi_error: str  # why none can be loaded
    launchers: tuple[Launcher, ...]  # each mpirun, the first in PATH first
    graphics: Graphics  # GPUs
    cores: int  # that may be used
    memory_bytes: int  # that may still be taken
    shared_memory_bytes: int  # size of /dev/shm
    interfaces: tuple[Interface, ...]  # network interfaces
    fabrics: tuple[str, ...] = ()  # adapters of InfiniBand and its like
    absent_paths: tuple[str, ...] = ()  # of those asked for
    clock: Clock | None = None  # None where it was not compared

    @property
    def mpi(self) -> Mpi | None:
        """The MPI that mpi4py loads."""
        return recognise(self.mpi_library)

    @property
    def own_launcher(self) -> Launcher | None:
        """The mpirun that `mpitrain run` takes: that beside Python, or the first in PATH."""
        beside = [launcher for launcher in self.launchers if launcher.beside_python]
        return next(iter([*beside, *self.launchers]), None)

    @property
    def path_launcher(self) -> Launcher | None:
        """The mpirun that its bare name starts: the first in PATH."""
        return next((launcher for launcher in self.launchers if launcher.in_path), None)


def read(told: Mapping[str, Any]) -> Facts:
    """Facts from the answer of an agent."""
    graphics = dict(told["gpus"])
    graphics["cards"] = tuple(graphics["cards"])
    return Facts(
        name=told["name"],
        root=told["root"],
        python=Python(**told["python"]),
        packages=told["packages"],
        mpitrain=Package(**told["mpitrain"]) if told["mpitrain"] else None,
        mpi_library=told["mpi"]["library"],
        mpi_error=told["mpi"]["error"],
        launchers=tuple(Launcher(**launcher) for launcher in told["launchers"]),
        graphics=Graphics(**graphics),
        cores=told["cores"],
        memory_bytes=told["memory_bytes"],
        shared_memory_bytes=told["shared_memory_bytes"],
        interfaces=tuple(Interface(**interface) for interface in told["interfaces"]),
        fabrics=tuple(told["fabrics"]),
        absent_paths=tuple(told["absent_paths"]),
    )
