"""Hosts and their slots, as `horovodrun -H` and hostfiles have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.runtime.hostfile import parse, read


@dataclass(frozen=True)
class HostInfo:
    """A host."""

    hostname: str  # its name
    slots: int  # how many ranks it takes

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Local: of `name:slots`."""
        return parse_hosts(host_string)[0]


@dataclass(frozen=True)
class SlotInfo:
    """The place of one rank: see `hvd.rank`, `local_rank` and `cross_rank`."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Local: the hosts of `a:2,b:2`.

    Raises:
        UsageError: it is no list of hosts.
    """
    return [HostInfo(host.name, host.slots) for host in parse(hosts_string, "hosts")]


def parse_host_files(filename: str) -> str:
    """Local: the hosts of a file as `a:2,b:2`.

    Raises:
        UsageError: it cannot be read.
    """
    return ",".join(f"{host.name}:{host.slots}" for host in read(filename))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Local: a place for each rank, host after host.

    Raises:
        ValueError: the hosts have too few slots.
    """
    wanted = max_num_proc or min_num_proc
    places = [(number, slot) for number, host in enumerate(hosts) for slot in range(host.slots)][:wanted]
    if len(places) < min_num_proc:
        raise ValueError(f"{min_num_proc} ranks need as many slots, and the hosts have {len(places)}")
    return [
        SlotInfo(
            hosts[number].hostname,
            rank,
            slot,
            sum(other < number and theirs == slot for other, theirs in places),
            len(places),
            sum(other == number for other, _ in places),
            sum(theirs == slot for _, theirs in places),
        )
        for rank, (number, slot) in enumerate(places)
    ]
