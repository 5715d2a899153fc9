"""Finding the launcher's terminal, in a /proc made of files."""

from __future__ import annotations

import os
import pty
import struct
from pathlib import Path

from mpitrain.runtime.terminal import launchers_terminal


def process(proc: Path, pid: int, name: str, parent: int, output: str) -> None:
    """Write what Linux says about one process."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    (proc / str(pid) / "fd" / "1").symlink_to(output)


def test_terminal_of_the_launcher_above_a_daemon(tmp_path: Path) -> None:
    import fcntl
    import termios

    controller, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 133, 0, 0))
        process(tmp_path, 30, "python) S 1", 20, "/dev/null")
        process(tmp_path, 20, "hydra_pmi_proxy", 10, "/dev/null")
        process(tmp_path, 10, "mpiexec", 5, os.ttyname(terminal))
        found = launchers_terminal(30, tmp_path)
    finally:
        os.close(controller)
        os.close(terminal)
    assert found is not None
    assert found.columns == 133


def test_launcher_that_writes_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    process(tmp_path, 30, "python", 10, "/dev/null")
    process(tmp_path, 10, "prterun", 5, str(tmp_path / "log"))
    assert launchers_terminal(30, tmp_path) is None


def test_no_launcher(tmp_path: Path) -> None:
    process(tmp_path, 30, "python", 10, "/dev/null")
    process(tmp_path, 10, "bash", 1, "/dev/null")
    assert launchers_terminal(30, tmp_path) is None


def test_ancestors_out_of_sight(tmp_path: Path) -> None:
    process(tmp_path, 30, "python", 10, "/dev/null")
    assert launchers_terminal(30, tmp_path) is None
