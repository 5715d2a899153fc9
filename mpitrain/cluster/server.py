"""Ranks become tasks of a TensorFlow cluster: ports and addresses are agreed over MPI, and each starts its server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.cluster import network
from mpitrain.cluster.jobs import Cluster, Task, arrange, sizes
from mpitrain.cluster.network import THIS_HOST, Network
from mpitrain.errors import UsageError
from mpitrain.faults import interfaces
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.world.consensus import run_on_all
from mpitrain.world.start import current_world
from mpitrain.world.world import World

EXPOSED = (
    "whoever reaches a TensorFlow server can run programs and read files there as the user who started it: gRPC asks "
    "for no name and no password"
)


@dataclass(frozen=True)
class Access:
    """Who may reach the servers."""

    networks: tuple[Network, ...] | None  # whose hosts may; None for everybody

    @classmethod
    def of(cls, bind: str | None, insecure_network: bool, hosts: int) -> Access:
        """Local: by default this host alone.

        Raises:
            UsageError: the job is on several hosts, and nobody said which network they are on.
        """
        if insecure_network:
            return cls(None)
        if bind is not None:
            return cls((*THIS_HOST, *network.parse(bind)))
        if hosts > 1:
            raise UsageError(
                f"the ranks are on {hosts} hosts, and {EXPOSED}. Name the network that the hosts are on and that you "
                "trust (--bind 10.0.0.0/24), or let everybody in with --insecure-network"
            )
        return cls(THIS_HOST)

    def address(self, one_host: bool) -> str:
        """Local: at which of its addresses this host is reached.

        Raises:
            UsageError: it has none in the networks.
        """
        if self.networks is None or self.networks == THIS_HOST:
            return interfaces.LOOPBACK if one_host else interfaces.addresses(os.environ)[0]
        return network.choose(interfaces.addresses(os.environ), self.networks[len(THIS_HOST) :])

    def __str__(self) -> str:
        if self.networks is None:
            return "for everybody who reaches this network"
        named = self.networks[len(THIS_HOST) :]
        return f"for hosts in {', '.join(map(str, named))}" if named else "for this host alone"


@dataclass(frozen=True)
class Place:
    """A cluster, and what this rank holds for it until its server listens."""

    cluster: Cluster  # all tasks
    access: Access  # who may reach them
    held: socket.socket  # keeps the port


def agree(
    jobs: str | Mapping[str, int], bind: str | None, insecure_network: bool, port: int | None, world: World
) -> Place:
    """Collective: which rank is which task, and at which address; see `start_server`.

    Raises:
        AgreedError: the same on all ranks.
    """
    topology = world.topology
    one_host = topology.node_count == 1

    def choose() -> tuple[dict[str, int], Access, str, socket.socket]:
        counts = sizes(jobs, world.size)
        access = Access.of(bind, insecure_network, topology.node_count)
        address = access.address(one_host)
        return counts, access, address, network.reserve(0 if port is None else port + world.local_rank)

    counts, access, address, held = run_on_all(world.communicator, world.hosts, choose)
    everyone = world.communicator.all_gather_obj(f"{address}:{held.getsockname()[1]}")
    return Place(arrange(counts, everyone, world.rank), access, held)


def cluster_spec(
    jobs: str | Mapping[str, int],
    *,
    bind: str | None = None,
    insecure_network: bool = False,
    port: int | None = None,
    world: World | None = None,
) -> Cluster:
    """Collective: the tasks, and free ports for them. Starts nothing; each port stays reserved for this process.

    For those who start `tf.distribute.Server` themselves: `tf.train.ClusterSpec(cluster.as_dict())`. A server
    that is not started by `start_server` listens on all addresses of its host.

    Args:
        jobs: see `start_server`; so are the others.
        bind: network of the addresses.
        insecure_network: needed on several hosts, unless a network is named.
        port: of the first rank of a host.
        world: all ranks; those of this process by default.

    Raises:
        AgreedError: see `start_server`.

    Example:
        >>> cluster = mpitrain.cluster.cluster_spec("worker")
        >>> list(cluster.as_dict())
        ['worker']
    """
    place = agree(jobs, bind, insecure_network, port, world or current_world())
    place.held.detach()  # stays open: nobody else gets the port before TensorFlow listens there, or after
    return place.cluster


def tf_config(jobs: str | Mapping[str, int] = "worker", **options: Any) -> str:
    """Collective: the value of TF_CONFIG for this rank, for those who want `tf.distribute`.

    `os.environ["TF_CONFIG"] = mpitrain.cluster.tf_config()`, before a strategy is made. The strategy starts the server,
    which then listens on all addresses of its host.

    Args:
        jobs: see `start_server`.
        options: of `cluster_spec`.

    Raises:
        AgreedError: see `start_server`.

    Example:
        >>> json.loads(mpitrain.cluster.tf_config("chief"))["task"]
        {'type': 'chief', 'index': 0}
    """
    return cluster_spec(jobs, **options).tf_config()


@dataclass(frozen=True)
class Server:
    """The server of this rank. It serves in threads of its own until the process ends.

    A rank that comes to the end of its program goes on serving until all ranks have come to theirs.

    Attributes:
        cluster: all tasks; `cluster.task` is that of this rank.
        access: who may reach it.
        server: the `tf.distribute.Server`.
    """

    cluster: Cluster
    access: Access
    server: Any = field(repr=False)

    @property
    def target(self) -> str:
        """Local: what `tf.compat.v1.Session` takes, of this rank's own task."""
        return self.cluster.target()

    @property
    def task(self) -> Task:
        """Local: which task this rank is."""
        assert self.cluster.task is not None
        return self.cluster.task


def start_server(
    jobs: str | Mapping[str, int],
    *,
    bind: str | None = None,
    insecure_network: bool = False,
    port: int | None = None,
    cpu_devices: int | None = None,
    config: Any = None,
    world: World | None = None,
) -> Server:
    """Collective: each rank becomes a task, in the order in which the jobs are named, and starts its server.

    Args:
        jobs: names, and the number of tasks of each, as in `ps=1,worker=2` or {"ps": 1, "worker": 2}.
        bind: networks whose hosts may connect, as in `10.0.0.0/24`; the tasks use their addresses in it. By
            default only processes of this host may, and the job must be on one.
        insecure_network: let everybody connect: TensorFlow's servers ask for no password.
        port: the first rank of each host listens there, the others behind; any free ones by default.
        cpu_devices: how many CPU devices each task has; 1 by default.
        config: a `tf.compat.v1.ConfigProto` in place of the one that follows from `mpitrain.init`.
        world: all ranks; those of this process by default.

    Returns:
        On all ranks once all servers listen.

    Raises:
        AgreedError: the same on all ranks: not as many ranks as tasks, no such port, or hosts that are not in the
            network.

    Example:
        >>> server = mpitrain.cluster.start_server("worker=1")
        >>> server.task.job, server.task.index
        ('worker', 0)
    """
    world = world or current_world()
    place = agree(jobs, bind, insecure_network, port, world)

    def listen() -> Any:
        settings = session_config(world.threads, world.devices, cpu_devices) if config is None else config
        return _listen(place, settings)

    server = run_on_all(world.communicator, world.hosts, listen)
    # Not before all listen: if one cannot, none has answered anybody.
    server.start()
    world.communicator.barrier()
    return Server(place.cluster, place.access, server)


def _listen(place: Place, config: Any) -> Any:
    """Local: a server that listens to those who may reach it, and does not answer yet."""
    import tensorflow as tf

    task, port = place.cluster.task, place.held.getsockname()[1]
    assert task is not None
    try:
        server = tf.distribute.Server(
            place.cluster.as_dict(), job_name=task.job, task_index=task.index, config=config, start=False
        )
    except tf.errors.OpError as error:
        raise UsageError(f"TensorFlow cannot listen on port {port}: {error.message}") from error
    place.held.close()
    if place.access.networks is not None:
        _restrict(port, place.access.networks)
    return server


def _restrict(port: int, networks: Sequence[Network]) -> None:
    try:
        sockets = network.restrict(port, networks)
        reason = "its sockets were not found"
    except OSError as error:
        sockets, reason = 0, str(error)
    # The filter is for what comes from now on; who was connected before stays so.
    strangers = network.strangers(port, networks)
    if sockets == 0 or strangers:
        reason = f"{strangers[0]} was faster" if strangers else reason
        raise UsageError(
            f"port {port} cannot be kept from other hosts ({reason}), and {EXPOSED}. On a network that you trust: "
            "--insecure-network"
        )


def session_config(threads: ThreadPlan, devices: DevicePlan, cpu_devices: int | None = None) -> Any:
    """Local: a `tf.compat.v1.ConfigProto`: what `init` chose for this rank, for sessions and servers.

    Servers make devices of their own, which `tf.config` does not reach.

    Args:
        threads: sizes of the thread pools.
        devices: the GPU, and how much of its memory.
        cpu_devices: how many CPU devices there are; 1 by default.

    Raises:
        UsageError: none at all is not possible.

    Example:
        >>> world = mpitrain.init()
        >>> config = mpitrain.cluster.session_config(world.threads, world.devices, cpu_devices=2)
        >>> config.device_count["CPU"]
        2
    """
    if cpu_devices is not None and cpu_devices < 1:
        raise UsageError(f"{cpu_devices} CPU devices asked for: TensorFlow needs one at least (--cpu-devices)")
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads.intra, inter_op_parallelism_threads=threads.inter
    )
    if cpu_devices is not None:
        config.device_count["CPU"] = cpu_devices
    if devices.hide:
        config.device_count["GPU"] = 0
    config.gpu_options.allow_growth = devices.growth
    if devices.fraction is not None:
        config.gpu_options.per_process_gpu_memory_fraction = devices.fraction
    if devices.memory_limit_mib is not None:
        config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[devices.memory_limit_mib])
    return config
