"""A TensorFlow cluster from the outside: its clients, who may connect, and its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launch.conftest import REPOSITORY, Job, Mpirun
from tests.launch.hosts import NETWORK, Hosts

SERVE = ["-m", "mpitrain", "serve"]
SECONDS = 500
TUTORIAL = REPOSITORY / "docs/distributed_tensorflow.md"
# What the tutorial's program is followed by: another client, at the address by which other hosts would come.
KEPT_OUT = """
import socket

from mpitrain.faults import interfaces

[own, *_] = interfaces.addresses({})
port = int(cluster.jobs["ps"][0].split(":")[1])
socket.create_connection(("127.0.0.1", port), 60).close()
try:
    socket.create_connection((own, port), 1).close()
    raise AssertionError(f"reached from {own}")
except (TimeoutError, socket.gaierror):
    print("kept out")
raise SystemExit(3)
"""


def program_of(page: str) -> str:
    """The Python of a page, each line where it stands there, so that errors name its lines."""
    lines, language = [], ""
    for line in page.splitlines():
        is_fence = line.startswith("```")
        if is_fence:
            language = "" if language else line[3:] or "text"
        lines.append(line if language == "python" and not is_fence else "")
    return "\n".join(lines)


def wait_for(job: Job, path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists() and job.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def nothing_left(job: Job) -> bool:
    deadline = time.monotonic() + 60
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return job.processes() == []


def test_the_tutorial(mpirun: Mpirun, tmp_path: Path) -> None:
    """Its program is the client of a cluster, which ends with it and with its exit code.

    Ranks that serve are not taken for ranks that wait for each other; at the start, on a busy machine, some do wait.
    """
    program = tmp_path / "program.py"
    program.write_text(program_of(TUTORIAL.read_text()) + KEPT_OUT)
    options = ["--jobs", "ps=2,worker=2", "--cpu-devices", "2", str(program)]
    watched = {"MPITRAIN_STALL_WARNING": "8", "MPITRAIN_STALL_ABORT": "0"}
    job = mpirun.start(4, [*SERVE, *options], env={"XDG_CACHE_HOME": str(tmp_path), **watched})
    finished = job.finish(SECONDS)
    assert finished.returncode == 3, finished.output
    assert "all ranks have come to an exchange" not in finished.stderr, finished.output
    assert "for this host alone; ends with" in finished.stdout
    for task in ("/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1"):
        assert f"\n{task} " in finished.stdout, finished.output
    assert "kept out" in finished.stdout, finished.output
    assert nothing_left(job)
    assert list((tmp_path / "mpitrain/clusters").iterdir()) == []


def test_between_graph_replication(mpirun: Mpirun) -> None:
    """Synchronous, as one process with all samples; then asynchronous, to the same answer."""
    points = np.random.default_rng(1).normal(size=(64, 3))
    answer = np.array([1.0, -2.0, 3.0])
    alone = np.zeros(3)
    for _ in range(20):
        alone -= 0.1 * 2 * points.T @ (points @ (alone - answer)) / 64
    finished = mpirun(3, ["examples/between_graph.py"], timeout=SECONDS)
    assert finished.returncode == 0, finished.output
    found: dict[str, list[list[float]]] = {}
    for line in finished.stdout.splitlines():
        task, _, weights = line.partition(": ")
        found.setdefault(task, []).append(json.loads(weights))
    assert sorted(found) == ["/job:worker/task:0", "/job:worker/task:1"], finished.output
    for synchronous, asynchronous in found.values():
        np.testing.assert_allclose(synchronous, alone, rtol=1e-12)
        np.testing.assert_allclose(asynchronous, answer, rtol=1e-3)


@pytest.mark.mpich
def test_a_signal_to_one_rank_stops_all(mpirun: Mpirun, tmp_path: Path) -> None:
    job = mpirun.start(2, [*SERVE, "--jobs", "ps=1,worker"], env={"XDG_CACHE_HOME": str(tmp_path)})
    wait_for(job, tmp_path / "mpitrain/clusters/default.json")
    last = {b"OMPI_COMM_WORLD_RANK=1", b"PMI_RANK=1"}
    ranks = [pid for pid in job.processes() if last & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))]
    os.kill(ranks[-1], signal.SIGTERM)
    finished = job.finish(SECONDS)
    assert finished.returncode == 0, finished.output
    assert nothing_left(job)


def test_stop_from_another_terminal(mpirun: Mpirun, tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    job = mpirun.execute([sys.executable, *SERVE, "--name", "one"], environment)
    wait_for(job, tmp_path / "mpitrain/clusters/one.json")
    second = mpirun.execute([sys.executable, *SERVE, "--name", "one"], environment).finish(SECONDS)
    assert second.returncode == 2, second.output
    assert "a cluster named one runs already" in second.stderr
    stop = [sys.executable, *SERVE, "--stop", "--name", "one"]
    stopped = mpirun.execute(stop, environment).finish(SECONDS)
    assert stopped.returncode == 0, stopped.output
    finished = job.finish(SECONDS)
    assert finished.returncode == 0, finished.output
    assert "stop it with Ctrl-C, or with `mpitrain serve --stop --name one`" in finished.stdout
    assert nothing_left(job)
    again = mpirun.execute(stop, environment).finish(SECONDS)
    assert again.returncode == 2, again.output
    assert "no cluster named one runs" in again.stderr


def test_wrong_numbers_of_tasks_are_refused(mpirun: Mpirun) -> None:
    finished = mpirun(2, [*SERVE, "--jobs", "ps=1,worker=2"])
    assert finished.returncode == 2, finished.output
    assert finished.stderr.count("need 3 ranks, one for each task, but there are 2") == 1


def test_several_hosts(hosts: Hosts, mpirun: Mpirun, tmp_path: Path) -> None:
    """They need a network, and in it their servers reach each other."""
    command = [*hosts.enter("node0"), sys.executable, "-m", "mpitrain", "run", "--allow-run-as-root"]
    environment = {**hosts.environment, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path)}
    on_two = [*command, "-H", "node0,node1", "--start-timeout", "200"]
    refused = mpirun.execute([*on_two, "serve"], environment).finish(SECONDS)
    assert refused.returncode == 2, refused.output
    assert "the ranks are on 2 hosts" in refused.stderr
    assert "--insecure-network" in refused.stderr
    path = tmp_path / "ordering.json"
    few = ["--tensors", "3", "--windows", "1", "--repeat", "2", "--work-seconds", "0.01", "--json", str(path)]
    bench = [*on_two, "bench", "ordering", *few, "--bind", f"{NETWORK}.0/24"]
    measured = mpirun.execute(bench, environment).finish(SECONDS)
    assert measured.returncode == 0, measured.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["at a time"] for row in rows] == ["all", "1"]
    for row in rows:
        raw = [row["raw"][name] for name in ("first_seconds", "last_seconds", "step_seconds")]
        assert all(len(values) == 2 for values in raw)
        assert all(0 < first <= last < step for first, last, step in zip(*raw, strict=True)), row
