"""`python -m mpitrain.cluster.client_main PID script.py ...`: a program that ends with the process that started it."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

from mpitrain.runtime.process_tree import die_with_parent


def main() -> None:
    """Local: run what the arguments name, as `python` would."""
    parent, *command = sys.argv[1:]
    die_with_parent(signal.SIGKILL, int(parent))
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
