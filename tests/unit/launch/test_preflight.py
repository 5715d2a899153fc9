"""The way to each host is tried before an MPI does."""

from __future__ import annotations

from pathlib import Path

from mpitrain.launch.preflight import find_unreached
from mpitrain.launch.ssh import Ssh

PROGRAM = """#!/bin/sh
for word; do host=$last; last=$word; done
case $host in
    down*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255 ;;
    fails) echo noise >&2; exit 1 ;;
esac
"""


def test_hosts_that_are_not_reached(tmp_path: Path) -> None:
    program = tmp_path / "ssh"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    ssh = Ssh((str(program),))
    assert find_unreached(ssh, []) == {}
    # A command that fails there is no way that is closed.
    assert find_unreached(ssh, ["up", "down1", "fails", "down2"]) == {
        f"down{number}": f"ssh: connect to host down{number} port 22: No route to host" for number in (1, 2)
    }
    [(host, words)] = find_unreached(Ssh((str(tmp_path / "absent"),)), ["a"]).items()
    assert host == "a"
    assert words.startswith(f"{tmp_path / 'absent'}: [Errno 2]")
