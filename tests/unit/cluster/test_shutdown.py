"""How a cluster is found, and how its ranks come to an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli.serve import divide
from mpitrain.cluster.jobs import Cluster, Task
from mpitrain.cluster.record import DEAD_SECONDS, VARIABLE, Record, find
from mpitrain.cluster.shutdown import GOING, ClientProcess, check_client, wait
from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import UsageError
from tests.simulated import run

CLUSTER = Cluster({"ps": ("h:1",), "worker": ("h:2", "h:3")}, Task("ps", 0))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.named("mine", {"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("code", [0, 3, 255])
def test_all_ranks_stop_when_one_is_asked(size: int, code: int) -> None:
    for asked_rank in range(size):

        def on_rank(communicator: Any, asked_rank: int = asked_rank) -> int:
            looks = iter([GOING] * 3)

            def asked() -> int:
                return next(looks, code) if communicator.rank == asked_rank else GOING

            return wait(communicator, asked, 0.001)

        assert run(size, on_rank) == [code] * size


def test_all_ranks_asked_at_once_take_rank_0s_code() -> None:
    assert run(4, lambda communicator: wait(communicator, lambda: communicator.rank, 0.001)) == [0] * 4
    assert wait(LocalCommunicator(), lambda: 5) == 5


def test_a_client_finds_what_was_written(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no cluster named mine runs"):
        record.read()
    record.write(CLUSTER)
    assert record.read() == Cluster(CLUSTER.jobs)
    assert record.path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(VARIABLE, str(record.path))
    assert find() == Cluster(CLUSTER.jobs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(record.path.parents[2]))
    assert find("mine") == Cluster(CLUSTER.jobs)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UsageError, match="no cluster named default runs"):
        find()
    record.remove()
    assert list(record.path.parent.iterdir()) == []


def test_a_name_is_taken_while_its_cluster_lives(record: Record) -> None:
    record.write(CLUSTER)
    with pytest.raises(UsageError, match="a cluster named mine runs already"):
        record.write(CLUSTER)
    long_ago = time.time() - 2 * DEAD_SECONDS
    os.utime(record.path, (long_ago, long_ago))
    record.write(CLUSTER)
    assert record.is_alive()


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", ".hidden", "a b"])
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError, match="cluster name"):
        Record.named(name, {})


def written_by(record: Record, **root: Any) -> None:
    """As another process would have written it."""
    record.write(CLUSTER)
    told = json.loads(record.path.read_text())
    told["rank 0"] |= root
    record.path.write_text(json.dumps(told))


def test_stop_waits_for_the_end(record: Record) -> None:
    written_by(record, host="elsewhere")
    assert record.beat()
    ended: list[bool] = []

    def serving() -> None:
        while record.beat():
            time.sleep(0.01)
        time.sleep(0.1)
        ended.append(True)
        record.remove()

    thread = threading.Thread(target=serving)
    thread.start()
    assert record.stop(30.0)
    assert ended == [True]
    thread.join()
    with pytest.raises(UsageError, match="no cluster named mine runs"):
        record.stop(30.0)


def test_stop_of_a_cluster_that_is_gone(record: Record) -> None:
    record.write(CLUSTER)
    long_ago = time.time() - 2 * DEAD_SECONDS
    os.utime(record.path, (long_ago, long_ago))
    assert not record.stop(30.0)
    record.write(CLUSTER)
    assert not record.stop(0.2)
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    written_by(record, process=[ended.pid, 1])
    assert not record.stop(30.0)
    assert list(record.path.parent.iterdir()) == []


def test_an_unreadable_record_is_none(record: Record) -> None:
    record.write(CLUSTER)
    for text in ("", "[]", "{}", '{"jobs": 3}', '{"jobs": {"ps": 3}}'):
        record.path.write_text(text)
        with pytest.raises(UsageError, match="no cluster named mine runs"):
            record.read()


def until_it_ends(client: ClientProcess) -> int:
    deadline = time.monotonic() + 60
    while (code := client.code()) == GOING and time.monotonic() < deadline:
        time.sleep(0.02)
    return code


def test_a_client_is_a_program_of_its_own(record: Record, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import os, sys, beside\n"
        f"told = [sys.argv, os.environ.get('{VARIABLE}'), os.environ.get('PMI_RANK'), __name__]\n"
        "open('told', 'w').write(repr(told))\nraise SystemExit(7)\n"
    )
    (tmp_path / "beside.py").touch()
    environ = {**os.environ, "PMI_RANK": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        client = ClientProcess.start([str(script), "--x", "1"], record, environ)
        assert until_it_ends(client) == 7
        assert eval((tmp_path / "told").read_text()) == [[str(script), "--x", "1"], str(record.path), None, "__main__"]
        module = ClientProcess.start(["-m", "beside"], record, environ)
        assert until_it_ends(module) == 0
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("command", "complaint"), [(["-m"], "name the module"), (["none.py"], "no client none.py")])
def test_a_client_that_is_none(command: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_client(command)


def test_clients_that_may_be() -> None:
    for command in ([], ["-m", "client"], [__file__, "--x"]):
        check_client(command)


def test_a_client_ends_when_it_is_told_or_left(record: Record, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    client = ClientProcess.start([str(script)], record, environ)
    assert client.code() == GOING
    client.end()
    assert client.code() == 128 + 15
    starter = (
        "import os, time\nfrom mpitrain.cluster.shutdown import ClientProcess\n"
        "from mpitrain.cluster.record import Record\n"
        f"client = ClientProcess.start([{str(script)!r}], Record.named('x', os.environ), os.environ)\n"
        "while not os.path.exists('pid'): time.sleep(0.02)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", starter], check=True, env=environ, cwd=tmp_path, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("arguments", "own", "rest"),
    [
        ("", "", ""),
        ("--jobs ps=1,worker", "--jobs ps=1,worker", ""),
        ("--jobs worker client.py --stop", "--jobs worker", "client.py --stop"),
        ("--insecure-network -m client --name x", "--insecure-network", "-m client --name x"),
        (
            "--bind 10.0.0.0/8 --port=2222 --gpu-memory 0.4 c.py",
            "--bind 10.0.0.0/8 --port=2222 --gpu-memory 0.4",
            "c.py",
        ),
        ("-h", "-h", ""),
        ("--stop --name other", "--stop --name other", ""),
    ],
)
def test_what_is_for_serve_and_what_for_its_client(arguments: str, own: str, rest: str) -> None:
    assert divide(arguments.split()) == (own.split(), rest.split())
