"""Jobs across three hosts, each with a name, a network and an sshd of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, Finished, Mpirun
from tests.launch.hosts import Hosts
from tests.launch.recovery_program import RECOVERY_PROGRAM, each_once, in_order, samples_taken, text_of

PROGRAM = str(Path(__file__).with_name("place_program.py"))
WITHIN_SECONDS = 300
AWAY_SECONDS = 6
pytestmark = pytest.mark.mpich


@pytest.fixture
def hostfile(hosts: Hosts, mpirun: Mpirun, tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    words = "{} slots=1\n" if mpirun.is_open_mpi else "{}:1\n"
    path.write_text("".join(words.format(name) for name in hosts.names))
    return path


def on_first(hosts: Hosts, mpirun: Mpirun, command: Sequence[str], **more: str) -> Finished:
    """Run a command on the first host, as its user would."""
    environment = {**hosts.environment, "PYTHONPATH": str(REPOSITORY), **more}
    return mpirun.execute([*hosts.enter("node0"), *command], environment).finish(WITHIN_SECONDS)


def run(*words: str) -> list[str]:
    return [sys.executable, "-m", "mpitrain", "run", "--allow-run-as-root", *words]


def test_places_and_variables(hosts: Hosts, mpirun: Mpirun, hostfile: Path) -> None:
    command = run("--hostfile", str(hostfile), "-x", "SEEN", "--network-interfaces", "eth0", sys.executable, PROGRAM)
    finished = on_first(hosts, mpirun, command, SEEN="a b;$c", UNSEEN="secret")
    assert finished.returncode == 0, finished.output
    expected = [f"rank {n} of 3: node {n}, local 0 on node{n}, SEEN=a b;$c, UNSEEN=None" for n in range(3)]
    assert sorted(finished.stdout.splitlines()) == expected, finished.output


def test_ranks_listen_where_the_job_s_traffic_goes(
    hosts: Hosts, mpirun: Mpirun, hostfile: Path, tmp_path: Path
) -> None:
    for name in hosts.names:  # as containers' bridges are: the same address on each host
        bridge = "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
        subprocess.run([*hosts.enter(name), "sh", "-c", bridge], check=True)
    ask = "import sys; from mpitrain.faults import interfaces as i; own = i.addresses({}); print(own, "
    offers = "[own, ['10.88.0.2', '172.17.0.1']]"
    asked = on_first(hosts, mpirun, [sys.executable, "-c", f"{ask}i.used(own, {offers}), i.used(own, [own]))"])
    both = ["10.88.0.1", "172.17.0.1"]
    assert asked.stdout == f"{both} {both[:1]} {both}\n", asked.output
    (tmp_path / "end").touch()
    program = str(Path(__file__).with_name("strangers_program.py"))
    finished = on_first(hosts, mpirun, run("--hostfile", str(hostfile), sys.executable, program, str(tmp_path / "end")))
    assert finished.returncode == 0, finished.output
    listening = re.findall(r"rank (\d) listens on ([\d.]+):", finished.stdout)
    assert sorted(listening) == [(str(rank), f"10.88.0.{rank + 1}") for rank in range(3)], finished.output
    for name in hosts.names:
        subprocess.run([*hosts.enter(name), "ip", "link", "delete", "docker0"], check=True)


def trained(finished: Finished) -> bool:
    accuracy = re.search(r"accuracy (0\.\d+)", finished.stdout)
    return finished.returncode == 0 and accuracy is not None and float(accuracy[1]) > 0.3


def test_the_default_job_by_mpitrain_run(hosts: Hosts, mpirun: Mpirun, hostfile: Path, tmp_path: Path) -> None:
    command = run("-np", "3", "--hostfile", str(hostfile), "--start-timeout", "120", "--show-plan", "--epochs", "1")
    finished = on_first(hosts, mpirun, [*command, "--output", str(tmp_path / "out")])
    assert trained(finished), finished.output
    assert "3 ranks on 3 hosts" in finished.stdout
    places = re.findall(r"^(\d) +(\d) +(node\d) +(\d) +CPU +\d+ +[\d.]+ GiB$", finished.stdout, re.MULTILINE)
    assert places == [(str(n), str(n), f"node{n}", "0") for n in range(3)], finished.output


def test_the_default_job_by_mpirun(hosts: Hosts, mpirun: Mpirun, hostfile: Path, tmp_path: Path) -> None:
    told = ["PYTHONPATH", *({"TF_ENABLE_ONEDNN_OPTS"} & set(os.environ))]  # all ranks have to have the same
    root = ["--allow-run-as-root", *(word for name in told for word in ("-x", name))] if mpirun.is_open_mpi else []
    given = "--hostfile" if mpirun.is_open_mpi else "-f"
    command = [mpirun.path, *root, given, str(hostfile), "-np", "3", sys.executable, "-m", "mpitrain"]
    finished = on_first(hosts, mpirun, [*command, "--epochs", "1", "--output", str(tmp_path / "out")])
    assert trained(finished), finished.output
    assert "3 ranks on 3 hosts" in finished.stdout


@pytest.mark.parametrize(
    ("options", "host", "reason"),
    [
        (["-H", "node0,nosuchhost"], "nosuchhost", "Could not resolve hostname nosuchhost"),
        (["-H", "node0,node1", "-p", "2222"], "node1", "port 2222: Connection refused"),
    ],
)
def test_a_host_that_is_not_reached(hosts: Hosts, mpirun: Mpirun, options: list[str], host: str, reason: str) -> None:
    finished = on_first(hosts, mpirun, run(*options, sys.executable, PROGRAM))
    assert finished.returncode != 0
    assert reason in finished.stderr, finished.output
    assert f"mpitrain: {host} cannot be reached by ssh" in finished.stderr
    assert finished.stdout == ""  # where Open MPI would explain at length what a daemon is
    assert [line for line in finished.stderr.splitlines() if not line.startswith(("mpitrain: ", "ssh: "))] == []


def test_a_network_that_is_away_for_some_seconds_is_waited_for(hosts: Hosts, mpirun: Mpirun, tmp_path: Path) -> None:
    gone: list[float] = []

    def be_away() -> None:
        while text_of(tmp_path / "steps-3-0").count("\n") < 14:
            time.sleep(0.05)
        hosts.cut("node1")
        gone.append(time.monotonic())
        time.sleep(AWAY_SECONDS)
        hosts.heal("node1")

    away = threading.Thread(target=be_away, daemon=True)
    away.start()
    command = run("-H", ",".join(hosts.names), "--start-timeout", "120", sys.executable, RECOVERY_PROGRAM)
    finished = on_first(hosts, mpirun, [*command, str(tmp_path)])
    assert gone, finished.output
    assert time.monotonic() - gone[0] > AWAY_SECONDS, finished.output
    away.join()
    assert (finished.returncode, finished.stdout) == (0, "trained\n"), finished.output
    assert in_order(samples_taken(tmp_path, 3)) == each_once(), finished.output


def test_a_host_falls_silent_and_the_job_goes_on_without_it(hosts: Hosts, mpirun: Mpirun, tmp_path: Path) -> None:
    """The last test of this module: the host does not come back."""
    command = run("-H", ",".join(hosts.names), "--start-timeout", "120", "--restarts", "2", "--min-np", "2")
    killed: list[float] = []

    def kill_in_the_second_epoch() -> None:
        while text_of(tmp_path / "steps-3-0").count("\n") < 14:
            time.sleep(0.05)
        hosts.kill("node2", silently=True)
        killed.append(time.time())

    threading.Thread(target=kill_in_the_second_epoch, daemon=True).start()
    finished = on_first(hosts, mpirun, [*command, sys.executable, RECOVERY_PROGRAM, str(tmp_path)])
    assert killed, finished.output
    # Open MPI may tell of it there in a box of its own, if ssh ends before the connection between its daemons does.
    assert (finished.returncode, finished.stdout.splitlines()[-1]) == (0, "trained"), finished.output
    assert "survives the loss of ranks, and of hosts other than this one, by at most 2 restarts, down to 2 ranks" in (
        finished.stderr
    )
    assert "mpitrain: the connection to node2 was lost while the job ran" in finished.stderr, finished.output
    again = re.search(
        r"; restart 1 of 2 in 1 s, with 2 ranks, without node2, from the checkpoint of step (\d+)\n", finished.stderr
    )
    assert again, finished.output
    assert (tmp_path / "begun-2-0").stat().st_mtime - killed[0] < 90
    # Every epoch has its samples once each, in the one order that follows from the seed, whoever took them.
    first, second = samples_taken(tmp_path, 3), samples_taken(tmp_path, 2)
    assert min(second) == int(again[1]) + 1
    before = {step: numbers for step, numbers in first.items() if step < min(second)}
    assert in_order({**before, **second}) == each_once(), finished.output
