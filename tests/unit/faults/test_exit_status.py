"""What a process ends with, known before it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STATUS = """
from sys import exit as leave_early
import atexit, sys
from mpitrain.faults.exit_status import ExitStatus
status = ExitStatus()
status.watch()
atexit.register(lambda: print(status.code, status.text, flush=True))
try: sys.exit(9)
except SystemExit as caught: assert caught.code == 9
class Stopped(SystemExit): pass
"""


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("pass", 0, "came to its end"),
        ("sys.exit()", 0, "called sys.exit()"),
        ("sys.exit(3)", 3, "called sys.exit(3)"),
        ("leave_early(4)", 4, "called sys.exit(4)"),
        ("sys.exit('text')", 1, "called sys.exit('text')"),
        ("exit(3)", 3, "raised SystemExit(3)"),
        ("quit()", 0, "raised SystemExit()"),
        ("raise SystemExit", 0, "raised SystemExit()"),
        ("raise SystemExit(300)", 44, "raised SystemExit(300)"),
        ("raise Stopped(85)", 85, "raised SystemExit(85)"),
        ("import threading; threading.Thread(target=sys.exit, args=(3,)).start()", 0, "came to its end"),
    ],
)
def test_the_status_is_known_before_the_end(end: str, code: int, text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{STATUS}{end}\n")
    ways: list[list[str]] = [[str(script)], ["-c", f"{STATUS}{end}"]]
    for way in ways if end == "raise SystemExit(300)" else ways[:1]:
        ended = subprocess.run([sys.executable, *way], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, f"{code} {text}\n"), ended.stderr
