"""A script finds what it finds under plain Python, and what ends it is told as there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("mpitrain"))
LOOKS = """
'''What the script is for.'''
import inspect, os, sys
def called(number: int, text: "str" = ""): ...
class Typed:
    number: int
os.chdir("/")
print(called.__annotations__, Typed.__annotations__, inspect.getsource(called))
print(__doc__, __name__, __file__, type(__loader__), sys.argv[1:], sys.path[0])
import beside, elsewhere
assert not sys.flags.optimize, "never seen"
print(sys.argv[0] if __spec__ is None else __spec__.name)
"""
WAYS = {
    "a file": ([], ["folder/looks.py", "--epochs", "3"]),
    "a module": ([], ["-m", "folder.looks", "--epochs", "3"]),
    "no asserts": (["-O"], ["folder/looks.py"]),
    "warnings are errors": (["-W", "error"], ["folder/looks.py"]),
    "a safe path": (["-P"], ["folder/looks.py"]),
    "isolated": (["-I"], ["folder/looks.py"]),
}


def ended(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    paths = f"{tmp_path / 'library'}"
    environ = {**os.environ, "PYTHONPATH": paths, "COVERAGE_PROCESS_START": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("folder/looks.py", "folder/beside.py", "beside.py", "library/elsewhere.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LOOKS if "looks" in name else "")
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_a_script_finds_what_it_finds_under_plain_python(way: str, folder: Path) -> None:
    flags, script = WAYS[way]
    if "-P" in flags and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no -P")
    plain = ended([sys.executable, *flags, *script], folder)
    ours = ended([sys.executable, *flags, "-m", "mpitrain", *script], folder)
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    assert ours.stderr.rstrip().splitlines()[1:] == plain.stderr.rstrip().splitlines(), "the traceback, under one line"


@pytest.mark.parametrize("script", [["folder/looks.py"], ["-m", "folder.looks"]])
def test_the_command_finds_the_same_as_python(script: list[str], folder: Path) -> None:
    plain = ended([sys.executable, *script], folder)
    assert plain.returncode == 0, plain.stderr
    assert ended([COMMAND, *script], folder).stdout == plain.stdout


@pytest.mark.parametrize("start", [[COMMAND], [sys.executable, "-m", "mpitrain"]])
def test_what_ends_a_script_is_told_without_the_lines_that_called_it(start: list[str], tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")  # no UTF-8
    (tmp_path / name).write_text("def fails(name):\n    raise OSError(name)\nfails(__file__)\n")
    lines = ended([*start, name], tmp_path).stderr.splitlines()
    assert lines[0].endswith("failed; the job ends")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{tmp_path}/caf')
    assert lines[2].endswith('.py", line 3, in <module>')
    assert lines[-1].startswith(f"OSError: {tmp_path}/caf\\udce9"), "told whatever its letters"


@pytest.mark.parametrize("end", ["sys.stdout.close(); sys.stderr.close()", "sys.stdout = sys.stderr = None"])
def test_what_ends_a_script_is_told_where_it_has_closed_its_streams(end: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import sys\n{end}\nraise ValueError('why')\n")
    finished = ended([COMMAND, "script.py"], tmp_path)
    assert finished.stderr.splitlines()[-1] == "ValueError: why"
    assert finished.returncode == 1
