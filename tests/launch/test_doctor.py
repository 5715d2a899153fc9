"""`mpitrain doctor` on hosts of their own: green as they are, and each planted fault named with what mends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from tests.launch.conftest import Mpirun
from tests.launch.hosts import NETWORK, Hosts

DOCTOR = (sys.executable, "-m", "mpitrain", "doctor")
TIMEOUT_SECONDS = 100.0  # the command itself promises a minute
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PACKAGE = Path(mpitrain.__file__).parent
BIN = Path(sys.executable).parent
# As MPICH's launcher answers to --version.
HYDRA = "#!/bin/sh\necho 'HYDRA build details:'\necho '    Version: 4.2.1'\n"
SHIFTED = "import time\n_true = time.time\ntime.time = lambda: _true() - 60\n"
# Runs the environment's Python under its own name, but for what stands before it.
INTERPRETER = '#!/bin/bash\n{before}exec -a {name} {real} "$@"\n'


def on(
    hosts: Hosts, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command on a host, as somebody who is logged in there."""
    return subprocess.run(
        [*hosts.enter(name), *command],
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@dataclass(frozen=True)
class Doctor:
    """What the command said on node0."""

    code: int
    findings: list[dict[str, Any]]
    seconds: float

    def of(self, colour: str) -> set[str]:
        return {finding["check"] for finding in self.findings if finding["colour"] == colour}

    def one(self, check: str, host: str) -> dict[str, Any]:
        (found,) = [
            one for one in self.findings if one["check"] == check and host in one["hosts"] and one["colour"] != "green"
        ]
        return found


def doctor(hosts: Hosts, *arguments: str, environ: dict[str, str] | None = None) -> Doctor:
    # Of what the MPIs are to be told, the program that stands for ssh, but not which network to take.
    ssh = {name: value for name, value in hosts.environment.items() if value == str(hosts.ssh)}
    finished = on(hosts, "node0", [*DOCTOR, *arguments, "--json"], {**ssh, **ROOT, **(environ or {})})
    assert finished.stdout.startswith("{"), finished.stderr
    told = json.loads(finished.stdout)
    assert "Traceback" not in finished.stderr, finished.stderr
    assert "mpitrain doctor: asking" in finished.stderr
    return Doctor(finished.returncode, told["findings"], told["seconds"])


@pytest.mark.mpich
def test_hosts_as_they_should_be_are_green(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    found = doctor(hosts, "--hostfile", str(hostfile))
    bad = [one for one in found.findings if one["colour"] != "green"]
    # Other programs of this machine may take cores, and so memory and speed, from the hosts.
    assert [one for one in bad if one["check"] not in ("link", "memory", "cores")] == []
    said = {one["check"]: one["sentence"] for one in found.findings}
    assert said["MPI job"] == "3 ranks on 3 hosts found each other"
    assert said["interfaces"] == f"in common: {NETWORK}.0/24 (eth0)"
    assert said["threads"] == "MPI gives the level multiple"
    assert said["link"].rpartition("slowest: ")[2].startswith("node")
    assert found.code == 0


Plant = Callable[[Hosts, Path], AbstractContextManager[None]]


@contextlib.contextmanager
def nothing(hosts: Hosts, folder: Path) -> Iterator[None]:
    yield


def scripts(host: str, plant: str, mend: str) -> Plant:
    """A fault that shell scripts make and take away again; `{folder}` is that of the hosts' files."""

    @contextlib.contextmanager
    def planted(hosts: Hosts, folder: Path) -> Iterator[None]:
        names = {"folder": str(hosts.directory), "own": str(folder), "package": str(PACKAGE), "bin": str(BIN)}

        def shell(script: str) -> None:
            finished = on(hosts, host, ["sh", "-e", "-c", script.format(**names)])
            assert finished.returncode == 0, finished.stdout + finished.stderr

        shell(plant)
        try:
            yield
        finally:
            shell(mend)

    return planted


def interpreter(before: str, real: str, name: str) -> Plant:
    """Another interpreter at the path of this one, on node1 only."""
    text = INTERPRETER.format(before=before, real=real, name=name)

    @contextlib.contextmanager
    def planted(hosts: Hosts, folder: Path) -> Iterator[None]:
        (folder / "sitecustomize.py").write_text(SHIFTED)
        (folder / "python").write_text(text.replace("OWN", str(folder)))
        with scripts("node1", REPLACE.format(python=Path(sys.executable).name), "umount {bin}; umount /run/bin")(
            hosts, folder
        ):
            yield

    return planted


# A copy of the environment's programs hides them, on one host, with another Python among them.
REPLACE = (
    "mkdir -p /run/bin; mount --bind {{bin}} /run/bin; mount -t tmpfs tmpfs {{bin}}; cp -a /run/bin/. {{bin}}; "
    "rm {{bin}}/{python}; cp {{own}}/python {{bin}}/{python}; chmod 755 {{bin}}/{python}"
)
REAL = os.path.realpath(sys.executable)
COPY = "cp -r {package} {own}/copy; sed -i 's/^__version__ = .*/__version__ = \"0.0.9\"/' {own}/copy/__init__.py"
ETH1 = "ip link add eth1 type veth peer name eth1p; ip link set eth1 up; ip link set eth1p up; ip addr add {} dev eth1"
# sshd is the first process of a host: it is sent to another port, and so nothing listens on its own.
SSHD_ELSEWHERE = (
    "(cat {folder}/sshd_config; echo Port 2222) >/run/sshd_config; mount --bind /run/sshd_config {folder}/sshd_config; "
    "kill -HUP 1; until ss -ltn | grep -q :2222; do sleep 0.1; done"
)
SSHD_BACK = "umount {folder}/sshd_config; kill -HUP 1; until ss -ltn | grep -q ':22 '; do sleep 0.1; done"
# A firewall of routing rules, which every kernel has: nothing goes from node1 to ports above, but for ssh's answers.
CLOSE = (
    "ip rule add pref 100 ipproto tcp sport 22 lookup main; ip rule add pref 101 ipproto tcp dport 1024-65534 prohibit"
)


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the doctor is to say."""

    name: str
    check: str
    colour: str
    sentence: str
    remedy: str
    plant: Plant = nothing
    listed: str = "node0,node1"
    arguments: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    host: str = "node1"


FAULTS = (
    Fault("name", "ssh", "red", "does not resolve", "getent hosts nowhere", listed="node0,nowhere", host="nowhere"),
    Fault(
        "sshd down", "ssh", "red", "sshd is down", "systemctl enable --now ssh",
        scripts("node1", SSHD_ELSEWHERE, SSHD_BACK),
    ),
    Fault(
        "password", "ssh", "red", "wants a password", "ssh-copy-id node1",
        scripts("node1", "mount --bind /dev/null {folder}/id.pub", "umount {folder}/id.pub"),
    ),
    Fault(
        "host key", "ssh", "red", "host key is unknown", "ssh-keyscan -H node1 >> ~/.ssh/known_hosts",
        scripts("node0", "mount --bind /dev/null {folder}/known_hosts", "umount {folder}/known_hosts"),
    ),
    Fault(
        "mpitrain missing", "mpitrain", "red", "is not installed", "node1",
        scripts("node1", "mount -t tmpfs tmpfs {package}", "umount {package}"),
    ),
    Fault(
        "mpitrain of another version", "mpitrain", "red", "another version: 0.0.9", "node1",
        scripts("node1", COPY + "; mount --bind {own}/copy {package}", "umount {package}"),
    ),
    Fault("another Python", "Python", "red", "another Python", "rsync", interpreter("", REAL, REAL)),
    Fault(
        "another MPI", "PATH", "red", "of another vendor: {own}/mpirun of MPICH 4.2.1", f"export PATH={BIN}:$PATH",
        host="node0", environ={"PATH": "{own}:" + os.environ["PATH"]},
    ),
    Fault("slots", "slots", "red", "7 ranks, but only 2 slots", "-np 2", arguments=("-np", "7")),
    Fault("root", "user", "red", "you are root", "export OMPI_ALLOW_RUN_AS_ROOT=1", environ=dict.fromkeys(ROOT, "")),
    Fault(
        "interface", "interfaces", "red", "eth1 (192.168.9.0/24) leads to no other host", f"_if_include={NETWORK}.0/24",
        scripts("node1", ETH1.format("192.168.9.1/24"), "ip link del eth1"),
    ),
    Fault(
        "port range", "firewall", "red", "node0 to node1, node1 to node0; ports tried: ", f"ufw allow from {NETWORK}.0",
        scripts("node1", CLOSE, "ip rule del pref 100; ip rule del pref 101"),
    ),
    Fault(
        "shared memory", "shared memory", "yellow", "/dev/shm has 64 MiB", "--shm-size",
        scripts("node1", "mount -t tmpfs -o size=64m tmpfs /dev/shm", "umount /dev/shm"),
    ),
    Fault(
        "clock", "clock", "red", "s behind the others (measured within", "ssh node1 'sudo timedatectl",
        interpreter("export PYTHONPATH=OWN:$PYTHONPATH\n", REAL, sys.executable),
    ),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_named_with_what_mends_it(fault: Fault, hosts: Hosts, tmp_path: Path) -> None:
    if not Mpirun().is_open_mpi:
        pytest.skip("sentences and remedies here are those of Open MPI")
    (tmp_path / "mpirun").write_text(HYDRA)
    (tmp_path / "mpirun").chmod(0o755)
    environ = {name: value.replace("{own}", str(tmp_path)) for name, value in fault.environ.items()}
    with fault.plant(hosts, tmp_path):
        found = doctor(hosts, "-H", fault.listed, *fault.arguments, environ=environ)
    said = found.one(fault.check, fault.host)
    assert said["colour"] == fault.colour
    assert fault.sentence.replace("{own}", str(tmp_path)) in said["sentence"]
    assert fault.remedy in said["remedy"]
    # Nothing else is blamed; of another Python everything differs.
    also = {"tensorflow", "keras", "numpy", "mpi4py"} if fault.check == "Python" else set()
    assert found.of("red") - also == ({fault.check} if fault.colour == "red" else set())
    assert found.code == (1 if fault.colour == "red" else 0)
    assert found.seconds < 60


def test_arguments_that_cannot_be(hosts: Hosts) -> None:
    finished = on(hosts, "node0", [*DOCTOR, "-H", "node0,no/de"])
    assert finished.returncode == 2
    assert "'no/de' is no name of a host" in finished.stderr
    assert finished.stdout == ""
