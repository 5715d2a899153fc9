"""Several hosts on this machine, for real runs across them: Linux namespaces, a bridge, and an sshd in each.

A host has its own network, name, processes, /run and /dev/shm; all other files are shared, as over NFS. Nothing is
changed on the machine itself: all of it is gone when the first process of each namespace has ended.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.88.0"  # inside the namespaces only
TOOLS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "mount")
SSHD = "/usr/sbin/sshd"
START_SECONDS = 30
NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
# What the first process of a host does. It stays, as sshd, and all end with it.
BOOT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
hostname {name}
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
mount --bind {directory}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/tmp /run/cgroup
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --move /run/cgroup /sys/fs/cgroup
touch {directory}/{name}.up
exec {sshd} -D -e -f {directory}/sshd_config
"""
SSHD_CONFIG = """HostKey {directory}/hostkey
AuthorizedKeysFile {directory}/id.pub
StrictModes no
PidFile none
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
SetEnv TMPDIR=/run/tmp
"""
SSH_CONFIG = """Host *
 IdentityFile {directory}/id
 IdentitiesOnly yes
 UserKnownHostsFile {directory}/known_hosts
 GlobalKnownHostsFile /dev/null
 StrictHostKeyChecking yes
"""


def missing() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "only root can make hosts out of namespaces"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None] + [SSHD] * (not Path(SSHD).exists())
    if absent:
        return f"not installed: {', '.join(absent)} (iproute2, openssh-server, openssh-client)"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "sh", "-c", "ip link add t0 type bridge && mount -t tmpfs t /mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Hosts:
    """Hosts `node0`, `node1`, ... that are up.

    Attributes:
        directory: keys, configuration and logs.
        names: of the hosts.
    """

    directory: Path
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self._first: dict[str, int] = {}  # pid of the first process in the namespaces of each
        self._unshare: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Make them."""
        for key in ("id", "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / key))
        addresses = [f"{NETWORK}.{number + 1}" for number in range(len(self.names))]
        lines = [f"{address} {name}\n" for address, name in zip(addresses, self.names, strict=True)]
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        key = (self.directory / "hostkey.pub").read_text()
        (self.directory / "known_hosts").write_text(f"{','.join(self.names)},{NETWORK}.* {key}")
        (self.directory / "sshd_config").write_text(SSHD_CONFIG.format(directory=self.directory))
        (self.directory / "ssh_config").write_text(SSH_CONFIG.format(directory=self.directory))
        self.ssh.write_text(f'#!/bin/sh\nexec ssh -F {self.directory}/ssh_config "$@"\n')
        self.ssh.chmod(0o755)
        self._spawn("switch", ["unshare", "--net", "--fork", "--kill-child", "sleep", "infinity"])
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("link", "set", "br0", "up")
        for name, address in zip(self.names, addresses, strict=True):
            boot = BOOT.format(name=name, address=address, directory=self.directory, sshd=SSHD)
            self._spawn(name, ["unshare", *NAMESPACES, "--fork", "--kill-child", "sh", "-c", boot])
            pair = ("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(self._first[name]))
            self._in_switch(*pair)
            self._in_switch("link", "set", name, "master", "br0", "up")
        for name in self.names:
            self._wait_for(name)

    def _wait_for(self, name: str) -> None:
        """Until its sshd answers."""
        up = self.directory / f"{name}.up"
        _until(up.exists, f"{name} did not start", self._log(name))
        check = [*self.enter(name), str(self.ssh), name, "true"]
        _until(lambda: subprocess.run(check, capture_output=True, check=False).returncode == 0, name, self._log(name))

    def down(self) -> None:
        """End them all."""
        for name in reversed(list(self._unshare)):
            self.kill(name)

    def kill(self, name: str, silently: bool = False) -> None:
        """End every process of a host; silently, so that the others hear nothing of it, as when power is lost."""
        if silently:
            self.cut(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first.pop(name), signal.SIGKILL)
        self._unshare.pop(name).wait(START_SECONDS)

    def cut(self, name: str) -> None:
        """Take the network away from a host, whose processes go on."""
        self._in_switch("link", "set", name, "down")

    def heal(self, name: str) -> None:
        """Give it back."""
        self._in_switch("link", "set", name, "up")

    @property
    def ssh(self) -> Path:
        """The program that reaches them."""
        return self.directory / "ssh"

    @property
    def environment(self) -> dict[str, str]:
        """What Open MPI and MPICH are to be told: that program, and the network."""
        return {
            "PRTE_MCA_plm_ssh_agent": str(self.ssh),
            "PRTE_MCA_prte_if_include": f"{NETWORK}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{NETWORK}.0/24",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "HYDRA_LAUNCHER_EXEC": str(self.ssh),
            "HYDRA_IFACE": "eth0",
        }

    def enter(self, name: str) -> list[str]:
        """What to put before a command for it to run on a host."""
        return ["nsenter", "--target", str(self._first[name]), "--all", f"--wd={Path.cwd()}", "env", "TMPDIR=/run/tmp"]

    def _in_switch(self, *words: str) -> None:
        _run("nsenter", "--target", str(self._first["switch"]), "--net", "ip", *words)

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._unshare[name] = process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        _until(lambda: bool(children.read_text().strip()), f"{shlex.join(command)} did not start", self._log(name))
        self._first[name] = int(children.read_text())

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


@contextlib.contextmanager
def several(count: int, directory: Path) -> Iterator[Hosts]:
    """So many hosts, for the time of a block."""
    hosts = Hosts(directory, tuple(f"node{number}" for number in range(count)))
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def _until(done: Callable[[], bool], complaint: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{complaint}: {log.read_text() if log else ''}")
        time.sleep(0.05)


def _run(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {finished.stderr.strip()}")
