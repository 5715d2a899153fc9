"""Tries the way to each host before an MPI does: it says which one is not reached in one line of ssh, and no box."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpitrain.launch.ssh import Ssh
from mpitrain.launch.ssh_program import NO_CONNECTION
from mpitrain.runtime import process_tree

MOST_AT_ONCE = 64
PATIENCE_SECONDS = 20  # beyond the connection: for a shell to start, and for questions that nobody answers


def find_unreached(ssh: Ssh, hosts: Sequence[str]) -> dict[str, str]:
    """Local: the hosts to which there is no connection, and what ssh says of each."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(hosts))) as pool:
        said = pool.map(lambda host: _asked(ssh, host), hosts)
        return {host: words for host, words in zip(hosts, said, strict=True) if words is not None}


def _asked(ssh: Ssh, host: str) -> str | None:
    try:
        seconds = ssh.connect_timeout_seconds + PATIENCE_SECONDS
        finished = process_tree.ask(ssh.command(host, ["true"]), seconds=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{ssh.program[0]}: {error}"
    return finished.stderr.strip() if finished.returncode == NO_CONNECTION else None
