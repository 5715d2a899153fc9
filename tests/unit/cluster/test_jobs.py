"""Which rank is which task."""

from __future__ import annotations

import json

import pytest

from mpitrain.cluster.jobs import Cluster, Task, arrange, sizes, task_of
from mpitrain.errors import UsageError

PS_AND_WORKERS = Cluster({"ps": ("a:1",), "worker": ("b:2", "b:3")})


@pytest.mark.parametrize(
    ("jobs", "ranks", "expected"),
    [
        ("ps=1,worker=2", 3, {"ps": 1, "worker": 2}),
        (" worker = 2 , ps = 1 ", 3, {"worker": 2, "ps": 1}),
        ("ps=2,worker", 5, {"ps": 2, "worker": 3}),
        ("ps,worker=3", 5, {"ps": 2, "worker": 3}),
        ("worker", 4, {"worker": 4}),
        ("worker_1=1", 1, {"worker_1": 1}),
        ({"ps": 1, "worker": 1}, 2, {"ps": 1, "worker": 1}),
    ],
)
def test_sizes(jobs: str | dict[str, int], ranks: int, expected: dict[str, int]) -> None:
    found = sizes(jobs, ranks)
    assert found == expected
    assert list(found) == list(expected)


@pytest.mark.parametrize(
    ("jobs", "ranks", "complaint"),
    [
        ("ps=1,worker=2", 4, "need 3 ranks, one for each task, but there are 4"),
        ("ps=1,worker=2", 2, "need 3 ranks, one for each task, but there are 2"),
        ("ps=2,worker", 2, "need at least 3 ranks"),
        ("ps,worker", 4, "one may stand without a number"),
        ("ps=1,ps=2", 3, "different names"),
        ("ps=0,worker=2", 2, "expected different names"),
        ("ps=x", 1, "expected different names"),
        ("ps=", 1, "expected different names"),
        ("1ps=1", 1, "expected different names"),
        ("a b=1", 1, "expected different names"),
        ("", 1, "expected different names"),
        ({}, 1, "need 0 ranks"),
        ({"ps": 0, "worker": 1}, 1, "need 1 rank,"),
    ],
)
def test_sizes_that_do_not_fit(jobs: str | dict[str, int], ranks: int, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        sizes(jobs, ranks)


def test_tasks_follow_the_ranks() -> None:
    counts = {"ps": 1, "chief": 1, "worker": 2}
    assert [task_of(counts, rank).device for rank in range(4)] == [
        "/job:ps/task:0", "/job:chief/task:0", "/job:worker/task:0", "/job:worker/task:1",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="too large"):
        task_of(counts, 4)
    cluster = arrange(counts, ["a:1", "b:1", "b:2", "c:1"], 3)
    assert cluster == Cluster({"ps": ("a:1",), "chief": ("b:1",), "worker": ("b:2", "c:1")}, Task("worker", 1))
    assert list(cluster.tasks().values()) == ["a:1", "b:1", "b:2", "c:1"]


@pytest.mark.parametrize(
    ("cluster", "arguments", "expected"),
    [
        (PS_AND_WORKERS, ("worker", 1), "grpc://b:3"),
        (PS_AND_WORKERS, ("ps",), "grpc://a:1"),
        (PS_AND_WORKERS, (), "grpc://b:2"),
        (Cluster({"ps": ("a:1",), "chief": ("b:1",), "worker": ("b:2",)}), (), "grpc://b:1"),
        (Cluster({"other": ("a:1",)}), (), "grpc://a:1"),
        (Cluster(PS_AND_WORKERS.jobs, Task("worker", 1)), (), "grpc://b:3"),
        (Cluster(PS_AND_WORKERS.jobs, Task("worker", 1)), ("worker",), "grpc://b:2"),
    ],
)
def test_targets(cluster: Cluster, arguments: tuple[str, int], expected: str) -> None:
    assert cluster.target(*arguments) == expected


def test_no_such_task() -> None:
    with pytest.raises(UsageError, match=r"no task /job:worker/task:2; .*: ps \(1\), worker \(2\)"):
        PS_AND_WORKERS.target("worker", 2)


def test_tf_config() -> None:
    own = Cluster(PS_AND_WORKERS.jobs, Task("worker", 1))
    assert json.loads(own.tf_config()) == {
        "cluster": {"ps": ["a:1"], "worker": ["b:2", "b:3"]},
        "task": {"type": "worker", "index": 1},
    }
    assert "task" not in json.loads(PS_AND_WORKERS.tf_config())
