"""Ranks that are started one by one: where they are, with which command, and how they start, end, and are ended."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.launch.allocation import Allocation
from mpitrain.launch.daemonless.keeper import Order, lines
from mpitrain.launch.daemonless.places import nodes_of, place_of
from mpitrain.launch.daemonless.request import INTERFACE_VARIABLE, interface_to
from mpitrain.launch.daemonless.starter import for_rank, is_here
from mpitrain.launch.dialect import OPEN_MPI, Mpi
from mpitrain.launch.job import LaunchJob
from mpitrain.launch.listener import Listener
from mpitrain.launch.request import Request
from mpitrain.launch.shrinkable_job import HOSTS, RANKS, allow_shrink, promise
from mpitrain.runtime.hostfile import Host, parse

REPOSITORY = Path(__file__).resolve().parents[3]
ELSEWHERE = "192.0.2.1"  # an address that nobody has (RFC 5737)
WITHIN_SECONDS = 60
REQUEST = Request(("program", "a b"), 3, parse("a:2,b:2", "test"), environment={"A": "b"}, extra=("--mca", "x", "1"))
JOB = LaunchJob(REQUEST, Mpi(OPEN_MPI, (5, 0, 11)), "/bin/mpirun")
SSH = "ssh -o BatchMode=yes"


@pytest.mark.parametrize(
    ("ranks", "hosts", "map_by", "nodes"),
    [
        (3, "a,b,c", "slot", [0, 1, 2]),
        (4, "a:2,b:2", "slot", [0, 0, 1, 1]),
        (4, "a:2,b:2", "node", [0, 1, 0, 1]),
        (4, "a:1,b:3", "node", [0, 1, 1, 1]),
        (3, "a:2,b:2", "slot", [0, 0, 1]),
        (2, "a:2,b:2", "slot", [0, 0]),
        (5, "a:1,b:1", "slot", [0, 0, 0, 1, 1]),
        (5, "a:1,b:1", "node", [0, 1, 0, 1, 0]),
    ],
)
def test_where_ranks_are(ranks: int, hosts: str, map_by: str, nodes: list[int]) -> None:
    assert nodes_of(ranks, parse(hosts), map_by) == nodes
    for rank, node in enumerate(nodes):
        told = place_of(rank, ranks, parse(hosts), map_by).variables()
        assert told == {
            "MPITRAIN_NODE": str(node),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(nodes[:rank].count(node)),
            "OMPI_COMM_WORLD_NODE_RANK": str(nodes[:rank].count(node)),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(nodes.count(node)),
        }


def test_the_command_starts_ranks_here_and_no_daemons() -> None:
    command = allow_shrink(JOB, 2).command({}, "/agent", SSH)
    words = command.argv
    assert words[: words.index("-x")][:5] == ("/bin/mpirun", "-np", "3", "--host", "localhost:3")
    assert " ".join(words).count("--with-ft ulfm --mca ompi_async_mpi_finalize 1 --mca x 1") == 1
    assert "--prtemca ras ^slurm,pbs,lsf,gridengine,flux --prtemca plm ssh " in " ".join(words)
    assert "--prtemca pmix_remote_connections 1 --mca btl tcp,self --mca osc ^sm" in " ".join(words)
    names = "A,MPITRAIN_MIN_NP,MPITRAIN_ON_FAILURE"
    assert words[-7:] == ("mpitrain.launch.daemonless.starter", "a:2,b:2", "slot", SSH, names, "program", "a b")
    given = command.environ({"SECRET": "x", "PATH": "/bin"})
    assert (given["A"], given["PATH"], given["PMIX_MCA_gds"], given["MPITRAIN_ON_FAILURE"]) == (
        *("b", "/bin", "hash"),
        "shrink",
    )
    assert "SECRET" not in given
    assert "PRTE_MCA_plm_ssh_agent" not in given, "there are no daemons to start"


@pytest.mark.parametrize(
    ("changes", "allocation", "survived", "daemonless", "told"),
    [
        ({}, None, None, True, "and hosts that are lost, .*Not the loss of this host"),
        ({}, None, RANKS, False, "Not the loss of a host: for that add --survive hosts"),
        ({"bind_to": "core"}, None, None, False, "Not the loss of a host: for that add --restarts"),
        ({"hosts": ()}, None, None, False, "hvd.elastic.run$"),
        ({"hosts": (Host("a", 3),)}, None, None, False, "hvd.elastic.run$"),
        ({}, "Slurm", None, False, "Not the loss of a host: for that add --survive hosts"),
        ({}, "Slurm", HOSTS, True, "Not the loss of this host"),
        ({}, "PBS", None, True, "Not the loss of this host"),
    ],
)
def test_when_hosts_are_survived(
    changes: dict[str, object], allocation: str | None, survived: str | None, daemonless: bool, told: str
) -> None:
    request = dataclasses.replace(REQUEST, **changes)  # type: ignore[arg-type]
    batch = None if allocation is None else Allocation(allocation, REQUEST.hosts)
    job = allow_shrink(dataclasses.replace(JOB, request=request, allocation=batch), 1, survived)
    assert job.shrinks_by_hosts == daemonless
    assert ("mpitrain.launch.daemonless.starter" in job.command({}, None).argv) == daemonless
    assert re.search(told, promise(job, 1)), promise(job, 1)


@pytest.mark.parametrize(
    ("changes", "words"), [({"hosts": ()}, "the job is on one host"), ({"bind_to": "core"}, r"\(--bind-to core\)")]
)
def test_when_hosts_cannot_be_survived(changes: dict[str, object], words: str) -> None:
    request = dataclasses.replace(REQUEST, **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"--survive hosts: .*{words}"):
        allow_shrink(dataclasses.replace(JOB, request=request), 1, HOSTS)


def test_once_one_host_is_left_it_is_an_ordinary_job() -> None:
    job = allow_shrink(JOB, 1)
    left = dataclasses.replace(job, request=dataclasses.replace(job.request, hosts=(Host("b", 2),), ranks=2))
    assert not left.shrinks_by_hosts
    assert left.command({}, "/agent").argv[3:5] == ("--host", "b:2")


def test_which_variables_a_rank_is_sent() -> None:
    here = {"A": "1", "B": "2", "HOME": "/me", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "MPITRAIN_NODE": "1"}
    not_sent = {"PMIX_SERVER_TMPDIR": "/tmp/x", "OMPI_FILE_LOCATION": "/tmp/y", INTERFACE_VARIABLE: "eth0"}
    sent = for_rank({**here, **not_sent}, ["A", "MY_*"])
    assert sorted(sent) == ["A", "MPITRAIN_NODE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"]


@pytest.mark.parametrize(
    ("name", "here"), [("localhost", True), ("127.0.0.1", True), (os.uname().nodename, True), (ELSEWHERE, False)]
)
def test_which_host_is_this_one(name: str, here: bool) -> None:
    assert is_here(name) == here


def test_the_loopback_leads_nowhere() -> None:
    assert interface_to((Host("127.0.0.1"),)) is None


def test_an_order_arrives_as_it_was_given() -> None:
    order = Order(1, "t", "/a b", ("sh", "-c", "$x;\n'\""), {"A": "b\n\udcff"})
    assert Order.of(order.line()) == order
    assert order.line().count(b"\n") == 1


def test_lines_end_with_silence() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"first\nsec")
    coming = lines(reading, 0.2)
    assert next(coming) == b"first"
    os.write(writing, b"ond\n\n")
    assert list(coming) == [b"second", b""]
    os.close(writing)
    os.close(reading)


CONNECT = 'shift; exec env -i PATH="$PATH" sh -c "$1"'


class Started:
    """A starter for rank 2 of 3, of which 1 and 2 are elsewhere, with something in place of ssh that connects to here.

    Args:
        directory: for files.
        program: of the rank, for a shell; `$$` is its process.
        connect: what stands for ssh, for a shell.
    """

    SECRET = "secret"

    def __init__(self, directory: Path, program: str, connect: str = CONNECT) -> None:
        ssh = directory / "connect"
        ssh.write_text(f"#!/bin/sh\n{connect}\n")
        ssh.chmod(0o700)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "SEEN": "a b;$c",
            "UNSEEN": "x",
            "MPITRAIN_RUN": self.SECRET,
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "PMIX_NAMESPACE": str(directory),
        }
        words = [f"localhost:1,{ELSEWHERE}:2", "slot", str(ssh), "SEEN,PYTHONPATH", "sh", "-c", program]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpitrain.launch.daemonless.starter", *words],
            env=environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str, list[tuple[str, int]]]:
        """Exit code, output, and the connections that were told to be lost."""
        try:
            stdout, stderr = self.process.communicate(timeout=WITHIN_SECONDS)
        finally:
            self.process.kill()  # with which all else ends
        listener = Listener(self.SECRET)
        shown = listener.feed(stderr.encode()) + listener.feed(b"")
        return self.process.returncode, stdout, shown.decode(), listener.connections()

    def signal(self) -> None:
        """Send USR1, once it is handed on."""
        status, bit = Path(f"/proc/{self.process.pid}/status"), 1 << (signal.SIGUSR1 - 1)
        wait_for(lambda: int(re.findall(r"SigCgt:\t(\w+)", status.read_text())[0], 16) & bit)
        self.process.send_signal(signal.SIGUSR1)

    def rank(self, directory: Path) -> int:
        """The process of the rank, which writes its number to `pid`."""
        file = directory / "pid"
        wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
        return int(file.read_text())


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + WITHIN_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


PID, WAIT = "echo $$ >pid.new; mv pid.new pid; ", "while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("program", "code"),
    [("exit 7", 7), ("exit 0", 0), ("exit 255", 255), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -9)],
)
def test_a_starter_ends_as_its_rank_ends(tmp_path: Path, program: str, code: int) -> None:
    show = 'echo "$SEEN,$UNSEEN,$MPITRAIN_NODE,$OMPI_COMM_WORLD_LOCAL_RANK,$PWD"; test -t 1 && echo late >&2; '
    ended, stdout, stderr, lost = Started(tmp_path, show + program).finish()
    assert (ended, stdout, stderr, lost) == (code, f"a b;$c,,1,1,{tmp_path}\n", "late\n", [])


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    started = Started(tmp_path, "exit 0", 'rm -r "$PWD"; shift; cd /; exec sh -c "$1"')
    ended, _, stderr, lost = started.finish()
    assert (ended, lost) == (127, [])
    assert f"mpitrain: rank 2 cannot be started on {os.uname().nodename}: " in stderr


def test_a_host_that_is_not_reached(tmp_path: Path) -> None:
    ended, _, stderr, lost = Started(tmp_path, "exit 0", "echo no route >&2; exit 255").finish()
    assert (ended, stderr, lost) == (255, "no route\n", [(ELSEWHERE, 255)])


def test_signals_are_handed_on(tmp_path: Path) -> None:
    started = Started(tmp_path, f"trap 'exit 85' USR1; {PID}{WAIT}")
    started.rank(tmp_path)
    started.signal()
    assert started.finish()[0] == 85


def test_a_connection_that_is_lost_looks_like_a_rank_that_is_killed(tmp_path: Path) -> None:
    started = Started(tmp_path, f"trap 'kill -KILL $PPID' USR1; {PID}{WAIT}")
    started.rank(tmp_path)
    started.signal()  # which comes to the rank only after it is known here to have started
    ended, _, _, lost = started.finish()
    assert (ended, lost) == (-signal.SIGKILL, [(ELSEWHERE, 255)])
    wait_for(lambda: is_gone(started.rank(tmp_path)))


def test_a_rank_does_not_outlive_its_starter(tmp_path: Path) -> None:
    started = Started(tmp_path, PID + WAIT)
    pid = started.rank(tmp_path)
    assert not is_gone(pid)
    started.process.kill()
    started.finish()
    wait_for(lambda: is_gone(pid))
