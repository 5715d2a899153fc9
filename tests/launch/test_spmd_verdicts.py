"""The plugin in tests/spmd/conftest.py: no failure of any rank is lost, and none hangs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Finished, Mpirun

PLUGIN = Path(__file__).resolve().parents[1] / "spmd" / "conftest.py"
# Open MPI gives its ranks a terminal, which pytest would colour.
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--color=no")
PREAMBLE = (
    "import os, sys, time, pytest\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.Get_rank()\n"
    "pytestmark = pytest.mark.mpich\n"
)
SOON = 100  # seconds, fewer than the usual limit of a test

pytestmark = pytest.mark.mpich


def run_tests(mpirun: Mpirun, directory: Path, body: str, np: int = 2) -> Finished:
    """Runs a test file of its own under the plugin."""
    shutil.copy(PLUGIN, directory / "conftest.py")
    (directory / "test_case.py").write_text(PREAMBLE + body)
    return mpirun(np, [*PYTEST, str(directory)], timeout=200, cwd=directory)


def test_passing_on_all_ranks_is_success(mpirun: Mpirun, tmp_path: Path) -> None:
    """A test that other numbers of ranks run is left out."""
    others = "@pytest.mark.ranks(2)\n@pytest.mark.ranks(1, 3)\ndef test_of_others(): assert False\n"
    finished = run_tests(mpirun, tmp_path, f"{others}def test_it(): print('said by', rank)")
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("1 passed, 1 deselected") == 1, finished.output
    assert finished.stdout.count("test session starts") == 1, finished.output


def test_what_happens_on_one_rank_fails_all(mpirun: Mpirun, tmp_path: Path) -> None:
    """A failure, a failure in setup (which runs the test on none), and a skip."""
    body = (
        "@pytest.mark.parametrize('failing', [0, 1, 2])\n"
        "def test_it(failing):\n    print('rank', rank, 'was here')\n"
        "    assert rank != failing, 'cause of ' + str(failing)\n"
        "@pytest.fixture\ndef broken():\n    assert rank == 0, 'no setup'\n"
        "def test_without_setup(broken):\n    MPI.COMM_WORLD.Barrier()\n"
        "def test_skipped():\n    if rank: pytest.skip('alone')\n"
        "def test_next(): assert MPI.COMM_WORLD.allreduce(1) == 3\n"
    )
    finished = run_tests(mpirun, tmp_path, body, np=3)
    assert finished.returncode != 0, finished.output
    assert "4 failed, 1 passed, 1 error" in finished.stdout, finished.output
    assert "no setup" in finished.stdout, finished.output
    failures = re.split(r"^_+ (\S+) _+$", finished.stdout, flags=re.MULTILINE)
    told = dict(zip(failures[1::2], failures[2::2], strict=True))
    for failing in range(3):
        assert f"cause of {failing}" in told[f"test_it[{failing}]"], finished.output
        assert f"rank {failing} was here" in told[f"test_it[{failing}]"], finished.output
    assert "alone" in told["test_skipped"], finished.output


def test_a_deadlock_ends_with_the_cause_and_the_stacks(mpirun: Mpirun, tmp_path: Path) -> None:
    body = (
        "@pytest.mark.timeout_seconds(4)\ndef test_it():\n    assert rank == 0, 'left early'\n"
        "    the_collective()\ndef the_collective():\n    MPI.COMM_WORLD.Barrier()\n"
    )
    finished = run_tests(mpirun, tmp_path, body)
    assert finished.returncode != 0, finished.output
    assert "left early" in finished.output, finished.output
    assert "in the_collective" in finished.output, finished.output
    assert finished.seconds < SOON, finished.output


def test_different_collections_end_the_job(mpirun: Mpirun, tmp_path: Path) -> None:
    body = "@pytest.mark.parametrize('x', range(1 + rank))\ndef test_it(x): pass\n"
    finished = run_tests(mpirun, tmp_path, body)
    assert finished.returncode != 0, finished.output
    assert "collected other tests" in finished.output, finished.output


def test_a_file_that_no_rank_can_import_is_an_error(mpirun: Mpirun, tmp_path: Path) -> None:
    finished = run_tests(mpirun, tmp_path, "raise RuntimeError('not importable')\n")
    assert finished.returncode != 0, finished.output
    assert "not importable" in finished.stdout, finished.output


@pytest.mark.parametrize("death", ["os._exit(7)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_a_rank_that_dies_ends_the_job(mpirun: Mpirun, tmp_path: Path, death: str) -> None:
    body = f"def test_it():\n    if rank == 1: {death}\n    MPI.COMM_WORLD.Barrier()\n"
    finished = run_tests(mpirun, tmp_path, body)
    assert finished.returncode != 0, finished.output
    assert finished.seconds < SOON, finished.output


def test_an_internal_error_ends_the_job(mpirun: Mpirun, tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text(
        "from mpi4py import MPI\ndef pytest_runtest_logstart(nodeid):\n"
        "    if MPI.COMM_WORLD.Get_rank() == 1: raise SystemError('hook')\n"
    )
    shutil.copy(PLUGIN, tmp_path / "conftest.py")
    (tmp_path / "test_case.py").write_text(f"{PREAMBLE}def test_it(): pass\n")
    args = [*PYTEST, "-p", "broken_plugin", str(tmp_path)]
    finished = mpirun(2, args, timeout=200, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert finished.returncode != 0, finished.output
    assert "hook" in finished.output, finished.output
    assert finished.seconds < SOON, finished.output


def test_the_time_limit_of_a_job_kills_every_process(mpirun: Mpirun) -> None:
    job = mpirun.start(2, ["-c", "import time; print('up', flush=True); time.sleep(600)"])
    assert job.process.stdout is not None
    assert [job.process.stdout.readline().strip() for _ in range(2)] == ["up", "up"]
    with pytest.raises(subprocess.TimeoutExpired):
        job.finish(timeout=1)
    assert job.processes() == []


def test_this_process_is_no_rank() -> None:
    assert "mpi4py.MPI" not in sys.modules
