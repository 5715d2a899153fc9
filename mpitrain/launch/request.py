"""What is to be started, checked before anything is: how many ranks, where, and what they are given. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.errors import UsageError
from mpitrain.runtime.counted import counted
from mpitrain.runtime.hostfile import Host

MAPPINGS = ("slot", "node")
BINDINGS = ("none", "core", "numa", "socket")
# What ranks on other hosts are given without being asked for: how Python, TensorFlow and the libraries that
# exchange data behave. Nothing here is a secret; devices are each host's own affair.
FORWARDED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_*", "TZ"),
    *("KERAS_*", "TF_*", "XLA_FLAGS", "OMP_*", "KMP_*", "MKL_NUM_THREADS", "CUDA_DEVICE_ORDER", "MPITRAIN_*"),
    *("HOROVOD_*", "NCCL_*", "UCX_*", "FI_*", "OMPI_MCA_*", "PMIX_MCA_*", "MPIR_CVAR_*", "I_MPI_*"),
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*")
# An interface, or a network in the notation of CIDR.
INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*(?:/\d{1,3})?")


@dataclass(frozen=True)
class Request:
    """A job, in the words of no MPI."""

    command: tuple[str, ...]  # program and arguments of each rank
    ranks: int  # how many
    hosts: tuple[Host, ...] = ()  # where; () for this host alone
    map_by: str = "slot"  # `slot` fills one host after the other, `node` gives each host one rank in turn
    bind_to: str = "none"  # what each rank is bound to: `none`, `core`, `numa` or `socket`
    oversubscribe: bool = False  # more ranks than slots are allowed
    allow_root: bool = False  # ranks may run as root
    # variables for the ranks; on this host alone they are added to those that all programs have
    environment: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()  # names or networks that ranks and daemons use; () for all
    tag_output: bool = False  # each line says which rank it is from
    extra: tuple[str, ...] = ()  # options handed to mpirun or srun as they are

    def __post_init__(self) -> None:
        for interface in self.interfaces:
            if not INTERFACE.fullmatch(interface):
                raise UsageError(f"{interface!r} is no network interface: expected a name such as eth0, or 10.0.0.0/24")
        if self.map_by not in MAPPINGS or self.bind_to not in BINDINGS:
            raise UsageError(
                f"ranks are mapped by {self.map_by} and bound to {self.bind_to}: "
                f"expected one of {', '.join(MAPPINGS)}, and one of {', '.join(BINDINGS)}"
            )


def count_ranks(asked: int | None, hosts: Sequence[Host], cores: int, oversubscribe: bool) -> tuple[int, bool]:
    """How many ranks there will be, and whether they are more than there are slots.

    Args:
        asked: the number given, if any; else there is a rank for each slot of `hosts`.
        hosts: where they run; () for this host alone, where each core is a slot.
        cores: of this host.
        oversubscribe: more than slots are allowed, up to the hosts' `max_slots`.

    Raises:
        UsageError: no number can be told, or it does not fit.
    """
    slots = sum(host.slots for host in hosts) if hosts else cores
    if asked is None:
        if not hosts:
            raise UsageError(
                "how many ranks? Give them before what is to be run, as in -np 4, or hosts with -H or --hostfile"
            )
        return slots, False
    if asked < 1:
        raise UsageError(f"-np is {asked}: there must be at least 1 rank")
    if asked <= slots:
        return asked, False
    where = (
        ", ".join(f"{host.name} {host.slots}" for host in hosts[:8])
        if hosts
        else f"this host has {counted(cores, 'core')}"
    )
    where += ", ..." * (len(hosts) > 8)
    if not oversubscribe:
        raise UsageError(
            f"{asked} ranks are more than there are slots, {slots} ({where}): ask for fewer, give hosts more slots, "
            "or allow it with --oversubscribe (ranks then share cores, and are slower)"
        )
    limits = [host.max_slots for host in hosts]
    if hosts and None not in limits and asked > sum(limit or 0 for limit in limits):
        raise UsageError(
            f"{asked} ranks are more than the hosts' max_slots allow, {sum(limit or 0 for limit in limits)}"
        )
    return asked, True


def forwarded(environ: Mapping[str, str], named: Sequence[str], patterns: Sequence[str] = FORWARDED) -> dict[str, str]:
    """The variables that ranks are given: those named, and those that match a pattern.

    Args:
        environ: the variables here.
        named: `NAME`, `NAME=VALUE`, or a pattern such as `MY_*`.
        patterns: of what is handed on without being named; () where ranks have all variables anyway.

    Raises:
        UsageError: a name cannot be one, or is not set here.
    """
    chosen = {name: value for name, value in environ.items() if matches(name, patterns) and VARIABLE.fullmatch(name)}
    for item in named:
        name, equals, value = item.partition("=")
        if not (VARIABLE if equals else PATTERN).fullmatch(name):
            raise UsageError(f"{item!r} names no environment variable: write -x NAME, -x NAME=VALUE or -x 'MY_*'")
        found = {name: value} if equals else {key: environ[key] for key in environ if matches(key, (name,))}
        if not found and VARIABLE.fullmatch(name):
            raise UsageError(f"-x {name}: the variable is not set here; set it, or write -x {name}=VALUE")
        chosen |= found
    for name, value in chosen.items():
        if "\0" in value:
            raise UsageError(f"the variable {name} holds a NUL character, which no program can be given")
    return chosen


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a variable is one of those that the patterns mean."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
