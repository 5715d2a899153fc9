"""On which host each rank is, where mpitrain and not an MPI places it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.launch.commands import shares
from mpitrain.runtime.hostfile import Host
from mpitrain.runtime.topology import NODE_VARIABLE


@dataclass(frozen=True)
class Place:
    """Of one rank."""

    host: str  # its name
    node: int  # its number among the hosts of the job
    local_rank: int  # of the ranks there, this is which
    local_size: int  # how many there are

    def variables(self) -> dict[str, str]:
        """What the rank is told: the words of Open MPI, which would have told it otherwise, and our own."""
        told = {
            "OMPI_COMM_WORLD_LOCAL_RANK": self.local_rank,
            "OMPI_COMM_WORLD_NODE_RANK": self.local_rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": self.local_size,
            NODE_VARIABLE: self.node,
        }
        return {name: str(value) for name, value in told.items()}


def place_of(rank: int, ranks: int, hosts: Sequence[Host], map_by: str) -> Place:
    """Where a rank is."""
    nodes = nodes_of(ranks, hosts, map_by)
    node = nodes[rank]
    return Place(hosts[node].name, node, nodes[:rank].count(node), nodes.count(node))


def nodes_of(ranks: int, hosts: Sequence[Host], map_by: str) -> list[int]:
    """The number of its host for each rank; more ranks than slots fill all slots as often as needed."""
    if map_by == "slot":
        counts = {host.name: count for host, count in shares(ranks, hosts)}
        return [node for node, host in enumerate(hosts) for _ in range(counts.get(host.name, 0))]
    nodes: list[int] = []
    while len(nodes) < ranks:  # all slots, as often as needed
        for turn in range(max(host.slots for host in hosts)):
            nodes += [node for node, host in enumerate(hosts) if turn < host.slots]
    return nodes[:ranks]
