"""Jobs of their own, for what can only be seen once in a process: its start and its peak of memory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import MpitrainError, UsageError
from mpitrain.launch import dialect
from mpitrain.runtime import launcher

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Mpirun:
    """How jobs are started here."""

    command: tuple[str, ...]  # mpirun and its options, without the number of ranks

    @classmethod
    def find(cls, command: str | None = None) -> Mpirun:
        """Local: `command` split as a shell would, or the mpirun beside this Python, or that on PATH.

        Raises:
            UsageError: there is none, or this process was itself started by one.
        """
        found = launcher.detect(os.environ)
        if found is not None and (found.size or 1) > 1:
            raise UsageError(
                f"this benchmark starts its own jobs, and was started by {found.name}: run it without mpirun, "
                "and give the number of ranks as --ranks"
            )
        if command:
            return cls(tuple(shlex.split(command)))
        return cls((dialect.find_mpirun(os.environ),))

    def run(self, ranks: int, code: str) -> Any:
        """Local: run Python `code` on `ranks` ranks.

        Returns:
            What its last line of output says, read as JSON.

        Raises:
            MpitrainError: the job failed; with the end of its output.
        """
        environ = launcher.without_rank(os.environ)
        command = [*self.command, "-np", str(ranks), sys.executable, "-c", code]
        try:
            finished = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except OSError as error:
            raise UsageError(f"{self.command[0]} cannot be run ({error}): give another as --mpirun") from error
        lines = finished.stdout.strip().splitlines()
        if finished.returncode or not lines:
            output = (finished.stdout + finished.stderr)[-2000:]
            raise MpitrainError(
                f"`{shlex.join(command[:-1])} ...` ended with code {finished.returncode}; is it right with "
                f"--mpirun? Its output ends with:\n{output}"
            )
        return json.loads(lines[-1])
