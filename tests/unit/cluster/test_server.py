"""Ranks agree on a cluster: threads that exchange real messages, and hold real ports."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence

import pytest

from mpitrain.cluster import Cluster, Task, cluster_spec, session_config, tf_config
from mpitrain.cluster.network import reserve
from mpitrain.errors import AgreedError, UsageError
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.world.world import World, world_of
from tests import simulated


def on_ranks(hosts: Sequence[str], action: Callable[[World], Cluster | str]) -> list[Cluster | str]:
    """What each rank gets, or is refused with."""

    def body(communicator: simulated.SimulatedCommunicator) -> Cluster | str:
        place = topology(communicator.rank, hosts, hosts)
        try:
            return action(world_of(communicator, place, DevicePlan(), ThreadPlan(1, 2)))
        except AgreedError as error:
            return str(error)

    return simulated.run(len(hosts), body)


def test_all_ranks_know_the_same_cluster() -> None:
    found = on_ranks(["a"] * 3, lambda world: cluster_spec("ps=1,worker", world=world))
    clusters = [one for one in found if isinstance(one, Cluster)]
    assert [one.task for one in clusters] == [Task("ps", 0), Task("worker", 0), Task("worker", 1)]
    assert all(one.jobs == clusters[0].jobs for one in clusters)
    addresses = list(clusters[0].tasks().values())
    assert len(set(addresses)) == 3
    for host, _, port in (address.partition(":") for address in addresses):
        assert host == "127.0.0.1"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):  # it is kept
            other.bind(("", int(port)))


def test_tf_config_of_each_rank() -> None:
    found = [json.loads(str(text)) for text in on_ranks(["a"] * 2, lambda world: tf_config(world=world))]
    assert [one["task"] for one in found] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert found[0]["cluster"] == found[1]["cluster"]
    assert len(found[0]["cluster"]["worker"]) == 2


def test_several_hosts() -> None:
    [one, other] = on_ranks(["a", "b"], lambda world: cluster_spec("worker", world=world))
    assert one == other
    assert "the ranks are on 2 hosts" in str(one)
    open_to_all = on_ranks(["a", "b"], lambda world: cluster_spec("worker", insecure_network=True, world=world))
    assert all(isinstance(one, Cluster) and "127.0.0.1" not in one.target() for one in open_to_all)
    refused = on_ranks(["a", "b"], lambda world: cluster_spec("worker", bind="203.0.113.0/24", world=world))
    assert all("no address in 203.0.113.0/24" in str(text) for text in refused)


def test_ports_that_were_asked_for() -> None:
    with reserve() as held:
        port = held.getsockname()[1]
    [cluster] = on_ranks(["a"], lambda world: cluster_spec("worker", port=port, world=world))
    assert isinstance(cluster, Cluster)
    assert cluster.target() == f"grpc://127.0.0.1:{port}"
    with socket.create_server(("", 0)) as taken:
        before = taken.getsockname()[1] - 1
        [one, other] = on_ranks(["a", "a"], lambda world: cluster_spec("worker", port=before, world=world))
    assert one == other
    assert f"port {before + 1} on " in str(one)


def test_a_port_that_cannot_be() -> None:
    found = on_ranks(["a"] * 2, lambda world: cluster_spec("worker", port=65535, world=world))
    assert (
        found == ["on rank 1 (a) only: port 65536: expected a number from 0 to 65535 (--port, and the local rank)"] * 2
    )


def test_bad_jobs_are_told_by_all() -> None:
    found = on_ranks(["a"] * 2, lambda world: cluster_spec("ps=2,worker", world=world))
    assert set(found) == {found[0]}
    assert "need at least 3 ranks" in str(found[0])


@pytest.mark.parametrize(
    ("devices", "cpu_devices", "expected"),
    [
        (DevicePlan(), None, "gpu_options { }"),
        (DevicePlan(growth=True), None, "gpu_options { allow_growth: true }"),
        (DevicePlan(fraction=0.5), None, "gpu_options { per_process_gpu_memory_fraction: 0.5 }"),
        (
            DevicePlan(memory_limit_mib=512),
            None,
            "gpu_options { experimental { virtual_devices { memory_limit_mb: 512 } } }",
        ),
        (DevicePlan(hide=True), None, 'device_count { key: "GPU" value: 0 } gpu_options { }'),
        (DevicePlan(), 3, 'device_count { key: "CPU" value: 3 } gpu_options { }'),
    ],
)
def test_session_config(devices: DevicePlan, cpu_devices: int | None, expected: str) -> None:
    config = session_config(ThreadPlan(3, 4), devices, cpu_devices)
    count, _, options = expected.rpartition("gpu_options")
    threads = "intra_op_parallelism_threads: 3 inter_op_parallelism_threads: 4"
    assert " ".join(str(config).split()) == f"{count}{threads} gpu_options{options}"


def test_no_cpu_at_all() -> None:
    with pytest.raises(UsageError, match="0 CPU devices asked for"):
        session_config(ThreadPlan(1, 2), DevicePlan(), 0)
