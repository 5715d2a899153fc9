"""The program that an MPI starts in place of ssh: ssh as it was configured here, and a note of how it ended.

MPIs take the path of a program, and neither quoted options nor options with `=` (Open MPI 5 cuts them off). And none
of them says of each host whether it was reached; Hydra does not notice at all when a host falls silent, while its
ssh does (ServerAliveInterval).
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from mpitrain.launch.ssh import Ssh

# ssh's own exit code for "there is no connection"; others are those of the command on the host.
NO_CONNECTION = 255
SCRIPT = """#!/bin/sh
# Written by mpitrain run: ssh to a host, and a note of how it ended.
host=
for word; do
    case $word in -*) ;; *) host=$word; break ;; esac
done
# In the background, so that this script can pass signals on while it waits.
exec 3<&0
{ssh} "$@" <&3 &
child=$!
trap 'kill -TERM $child' TERM HUP INT
wait $child
code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
echo "$code $host" >>{directory}/notes
# Whoever made the directory removes it, unless it was killed.
kill -0 {maker} 2>/dev/null || rm -rf {directory}
exit $code
"""


class SshProgram:
    """The program, in a private directory that is removed at the end."""

    def __init__(self, ssh: Ssh) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mpitrain-run-"))
        self.path = self._directory / "ssh"
        self._notes = self._directory / "notes"
        self._seen = 0
        command = shlex.join([*ssh.program, *ssh.options])
        directory = shlex.quote(str(self._directory))
        self.path.write_text(SCRIPT.format(ssh=command, directory=directory, maker=os.getpid()))
        self.path.chmod(0o700)

    def __enter__(self) -> SshProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def ended(self) -> list[tuple[str, int]]:
        """Local: hosts whose ssh has ended since the last call, and its exit code."""
        try:
            lines = self._notes.read_text().splitlines()
        except FileNotFoundError:
            return []
        new, self._seen = lines[self._seen :], len(lines)
        words = [line.split(" ", 1) for line in new]
        return [(host, int(code)) for code, host in words]
