"""Hosts of their own on this machine: namespaces with an address, a name, an sshd, a /run and a /dev/shm each.

Files are shared by all, as over NFS, so that one environment serves all of them. Nothing is changed outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NETWORK = "10.78.0"
ALL = ("--net", "--uts", "--ipc", "--mount", "--pid")
SSHD = "/usr/sbin/sshd"
TOOLS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", SSHD)
# The first process of a host; those in it end with it.
SETUP = """
set -e
mount --make-rprivate /
hostname {name}
mount -t proc proc /proc
mount -t tmpfs tmpfs /run; mkdir /run/sshd /run/tmp
mount -t tmpfs tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
ip link set lo up; ip link set eth0 up; ip addr add {address}/24 dev eth0
{sshd} -f {folder}/sshd_config
echo up
exec sleep infinity
"""
SSHD_CONFIG = """HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PidFile /run/sshd.pid
UsePAM no
UseDNS no
PermitRootLogin yes
SetEnv TMPDIR=/run/tmp
"""
SSH_CONFIG = """Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""


def hindrance() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"virtual hosts need {', '.join(lacking)}"
    tried = subprocess.run(
        ["unshare", *ALL, "--fork", "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"virtual hosts need namespaces: {tried.stderr.strip()}" if tried.returncode else None


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class VirtualHosts:
    """Hosts node0, node1, ... with addresses 10.78.0.1, ...; a context manager that takes them down again.

    Args:
        folder: for keys and settings.
        count: how many.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = tuple(f"node{number}" for number in range(count))
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> VirtualHosts:
        try:
            self._write_files()
            self._start(
                "switch", ["unshare", "--net", "--fork", "--kill-child", "sh", "-c", "echo up; exec sleep infinity"]
            )
            self._switch("ip", "link", "add", "br0", "type", "bridge")
            self._switch("ip", "link", "set", "br0", "up")
            for number, name in enumerate(self.names):
                self._boot(name, f"{NETWORK}.{number + 1}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()  # unshare's --kill-child ends all that is within
            process.wait()

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which MPIs reach the hosts."""
        ssh = str(self.folder / "ssh")
        return {"PRTE_MCA_plm_ssh_agent": ssh, "HYDRA_LAUNCHER_EXEC": ssh, "TMPDIR": "/run/tmp"}

    def run(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as somebody who is logged in there."""
        return subprocess.run(
            ["nsenter", "--target", self._first(name), *ALL, f"--wd={Path.cwd()}", *command],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    def shell(self, name: str, script: str) -> None:
        """Run a script on a host that must succeed."""
        finished = self.run(name, ["sh", "-e", "-c", script])
        assert finished.returncode == 0, finished.stdout + finished.stderr

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for key in ("key", "host_key"):
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)])
        host_key = (self.folder / "host_key.pub").read_text()
        lines = [f"{NETWORK}.{number + 1} {name}\n" for number, name in enumerate(self.names)]
        files = {
            "hosts": "127.0.0.1 localhost\n" + "".join(lines),
            "known_hosts": f"{','.join(self.names)},{NETWORK}.* {host_key}",
            "sshd_config": SSHD_CONFIG.format(folder=self.folder),
            "ssh_config": SSH_CONFIG.format(folder=self.folder),
            "ssh": f'#!/bin/sh\nexec ssh -F {self.folder}/ssh_config "$@"\n',
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "ssh").chmod(0o755)

    def _boot(self, name: str, address: str) -> None:
        script = SETUP.format(name=name, address=address, folder=self.folder, sshd=SSHD)
        # The setup waits for its end of the cable.
        waiting = "until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done\n"
        process = self._popen(name, ["unshare", *ALL, "--fork", "--kill-child", "sh", "-c", waiting + script])
        pid = self._first(name)
        self._switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self._switch("ip", "link", "set", name, "master", "br0", "up")
        self._await(name, process)

    def _start(self, name: str, command: Sequence[str]) -> None:
        self._await(name, self._popen(name, command))

    def _popen(self, name: str, command: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._processes[name] = process
        return process

    def _await(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "up\n":
                return
        raise RuntimeError(f"{name} did not start: {''.join(said)}")

    def _first(self, name: str) -> str:
        """The process id, seen from outside, of the first process in a host's namespaces."""
        outer = self._processes[name].pid
        for _ in range(500):
            children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            if children:
                return children[0]
            time.sleep(0.01)
        raise RuntimeError(f"{name} has no process")

    def _switch(self, *command: str) -> None:
        _run(["nsenter", "--target", self._first("switch"), "--net", *command])
