"""A script finds what it finds under plain Python, and what ends it is told as there."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import AgreedError
from mpitrain.scripts import script
from mpitrain.scripts.script import Script
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.world.world import World
from tests.unit.job import run

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


def test_a_script_for_horovod_that_there_is_not_is_told_before_tensorflow_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mpitrain", "--as-horovod", "absent.py"]
    finished = ended(command, tmp_path)
    assert "the script absent.py cannot be read: No such file" in finished.stderr
    loaded = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "mpitrain.scripts.script" in loaded
    assert not loaded & {"tensorflow", "keras"}


LOOK = "import builtins\nbuiltins.seen = __name__\n"


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(builtins, "seen", None, raising=False)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("own", "tool"):
            del sys.modules[name]


def unchanged(what: Script) -> Any:
    run(1, lambda world: script.run_unchanged(world, what))
    return vars(builtins)["seen"]


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    "name", ["absent", "own.absent", "own", "own.train.deeper", "not/a.name", "own..train", "", "json.absent"]
)
def test_modules_that_there_are_not(tmp_path: Path, name: str) -> None:
    """And nothing is imported to find out."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("raise ZeroDivisionError")
    (tmp_path / "own" / "train.py").write_text("raise ZeroDivisionError")
    with pytest.raises(AgreedError, match=rf"there is no module '{name}' that -m could run"):
        unchanged(Script(name, is_module=True))
    assert "own" not in sys.modules


@pytest.mark.usefixtures("_as_before")
def test_files_that_cannot_be_read_or_are_no_python(tmp_path: Path) -> None:
    with pytest.raises(AgreedError, match=r"the script none\.py cannot be read: No such file"):
        unchanged(Script("none.py"))
    (tmp_path / "broken.py").write_text("1 +\n")
    with pytest.raises(SyntaxError) as caught:
        unchanged(Script("broken.py"))
    assert caught.value.filename == str(tmp_path / "broken.py")


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", ["horovod.tensorflow", "horovodlike"])
def test_a_script_of_horovod_is_told_of_the_option(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(f"import {name} as hvd\n")
    with pytest.raises(ModuleNotFoundError) as caught:
        unchanged(Script("train.py"))
    assert ("put --as-horovod before the script" in caught.value.msg) == (name == "horovod.tensorflow")


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("dry_run", [True, False])
def test_one_rank_changes_nothing(tmp_path: Path, dry_run: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(LOOK)
    before = builtins.input
    run(1, lambda world: script.run(world, Script("train.py"), tmp_path / "out", WorkDivision(dry_run=dry_run)))
    assert (vars(builtins)["seen"] is None) == dry_run
    assert capsys.readouterr().out == ("other      one rank: the script runs as it is\n" if dry_run else "")
    assert builtins.input is before
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_as_before")
def test_what_one_rank_cannot_read_all_are_told(tmp_path: Path) -> None:
    (tmp_path / "only 0.py").write_text("pass\n")

    def rank(world: World) -> None:
        with pytest.raises(AgreedError, match=r"on rank 1 \(host\) only: the script only 1\.py cannot be read"):
            script.run_unchanged(world, Script(f"only {world.rank}.py"))

    run(2, rank)


@pytest.mark.usefixtures("_as_before")
def test_no_log_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "train.py").write_text(LOOK)

    def rank(world: World) -> None:
        with pytest.raises(
            AgreedError, match=r"nothing can be written in .*file/out \(Not a directory\): give another"
        ):
            script.run(world, Script("train.py"), tmp_path / "file" / "out", WorkDivision())

    run(2, rank)


@pytest.mark.parametrize("content", [b"def f(:\n", b"print(1)\0\n", b"print('\xe9')\n"])
def test_a_script_that_is_no_python_is_told_as_python_tells_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(content)
    finished = ended([COMMAND, "script.py"], tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[0].endswith("failed; the job ends")
    assert "SyntaxError" in finished.stderr.splitlines()[-1]
    assert "mpitrain/" not in finished.stderr
