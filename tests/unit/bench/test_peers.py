"""Other libraries in the same job."""

from __future__ import annotations

import importlib.util
import json

from mpitrain.bench import peers
from tests.unit.job import run


def test_each_rank_is_a_worker_with_a_port_of_its_own() -> None:
    found = [json.loads(text) for text in run(3, peers.cluster)]
    workers = found[0]["cluster"]["worker"]
    assert [one["task"] for one in found] == [{"type": "worker", "index": rank} for rank in range(3)]
    assert all(one["cluster"]["worker"] == workers for one in found)
    assert len(set(workers)) == 3
    assert all(worker.startswith("127.0.0.1:") for worker in workers)


def test_workers_of_several_hosts_are_named_by_them() -> None:
    found = json.loads(run(2, peers.cluster, ["node1", "node2"])[0])["cluster"]["worker"]
    assert [worker.partition(":")[0] for worker in found] == ["node1", "node2"]


def test_horovod_is_a_peer_where_it_is() -> None:
    there = importlib.util.find_spec("horovod") is not None
    assert peers.available() == (peers.MIRRORED, *([peers.HOROVOD] if there else []))
