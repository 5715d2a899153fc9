"""Where each rank of the job is: whoever has a communicator gathers the keys of the nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

# For ranks whose MPI takes them all to be on one host: the number of the one they are on.
NODE_VARIABLE = "MPITRAIN_NODE"


@dataclass(frozen=True)
class Topology:
    """One rank's place in the job."""

    rank: int  # this process, 0 to `size - 1`
    size: int  # number of ranks in the job
    local_rank: int  # position of this rank among the ranks of its node
    local_size: int  # number of ranks on its node
    node_rank: int  # position of its node, in the order in which nodes first appear among the ranks
    hosts: tuple[str, ...]  # host name of each rank
    nodes: tuple[int, ...]  # node rank of each rank

    @property
    def host(self) -> str:
        """Name of the host this rank is on."""
        return self.hosts[self.rank]

    @property
    def node_count(self) -> int:
        """Number of nodes that have at least one rank."""
        return max(self.nodes) + 1

    @property
    def is_root(self) -> bool:
        """True on rank 0 only."""
        return self.rank == 0

    @classmethod
    def single(cls, host: str) -> Topology:
        """The place of a process that is alone."""
        return topology(0, [host], [host])


def topology(rank: int, node_keys: Sequence[Hashable], hosts: Sequence[str]) -> Topology:
    """The place of `rank`, from what each rank says about its node.

    Args:
        rank: this process.
        node_keys: one key for each rank, equal for ranks of the same node (that share memory).
            Host names do not serve: two nodes may have the same one.
        hosts: host name of each rank.

    Raises:
        ValueError: the lists differ in length, or `rank` is not in them.
    """
    size = len(node_keys)
    if len(hosts) != size or not 0 <= rank < size:
        raise ValueError(f"rank {rank} with {size} node keys and {len(hosts)} hosts: expected one of each per rank")
    order = {key: position for position, key in enumerate(dict.fromkeys(node_keys))}
    nodes = tuple(order[key] for key in node_keys)
    here = nodes[rank]
    return Topology(rank, size, nodes[:rank].count(here), nodes.count(here), here, tuple(hosts), nodes)


def machine(host: str, addresses: Sequence[str], proc: Path = Path("/proc")) -> Hashable:
    """Local: what is the same for two processes only if they are on one host; None if that is not seen.

    Names alone do not serve: two hosts may have the same one, and launchers take two names of one host for two. Nor
    does the number of the boot alone: containers share it, and copies of a virtual machine may.
    """
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip(), host, *addresses
    except OSError:
        return None
