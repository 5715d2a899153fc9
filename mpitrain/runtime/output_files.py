"""Files of its own for what each rank prints, where `mpitrain run --output-filename` asks for them."""

from __future__ import annotations

import os
from pathlib import Path

from mpitrain.errors import LauncherError

OUTPUT_VARIABLE = "MPITRAIN_RUN_OUTPUT"  # the directory of these files


def directory_of(directory: Path, rank: int) -> Path:
    """Where one rank's `stdout` and `stderr` are, as horovodrun names it."""
    return directory / f"rank.{rank}"


def redirect(directory: Path, rank: int) -> None:
    """Local: all output of this process goes to files of its own from now on.

    Raises:
        LauncherError: they cannot be written.
    """
    own = directory_of(directory, rank)
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
    except OSError as error:
        raise LauncherError(
            f"rank {rank} on {os.uname().nodename} cannot write to {own} ({error.strerror}): "
            "give another --output-filename"
        ) from error
