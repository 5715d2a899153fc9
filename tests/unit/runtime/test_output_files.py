"""Files of its own for what a rank prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.errors import LauncherError
from mpitrain.runtime.output_files import directory_of, redirect

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from mpitrain.runtime.output_files import redirect
redirect(Path(sys.argv[1]), 3)
print("printed", flush=True)
subprocess.run(["sh", "-c", "echo by a child; echo told >&2"])
os.write(2, b"native\\n")
"""


def test_all_output_goes_there(tmp_path: Path) -> None:
    old = directory_of(tmp_path, 3)
    old.mkdir()
    (old / "stdout").write_text("of an earlier job\n")
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
    assert (old / "stdout").read_text() == "printed\nby a child\n"
    assert (old / "stderr").read_text() == "told\nnative\n"
    assert (old / "stderr").stat().st_mode & 0o077 == 0


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "rank.1").touch()
    before = [os.fstat(number).st_ino for number in (1, 2)]
    with pytest.raises(LauncherError, match=r"rank 1 on .* give another --output-filename"):
        redirect(tmp_path, 1)
    assert [os.fstat(number).st_ino for number in (1, 2)] == before
