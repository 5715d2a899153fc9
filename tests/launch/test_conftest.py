"""What these tests themselves rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launch.conftest import REPOSITORY, SHARED

CONFTEST = "from tests.launch.conftest import pytest_xdist_make_scheduler\n"
TESTS = f"""
import os, pathlib, pytest

@pytest.fixture(scope="module", params=[{SHARED!r}])
def dear():
    pathlib.Path("made-by", str(os.getpid())).touch()

@pytest.mark.parametrize("number", range(6))
def test_shares(dear, number): pass

@pytest.mark.parametrize("number", range(6))
def test_alone(number): pass
"""


def test_what_tests_share_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "made-by").mkdir()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "3",
        "--dist",
        "loadgroup",
        str(tmp_path),
    ]
    environ = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    finished = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "12 passed" in finished.stdout, finished.stdout + finished.stderr
    assert len(list((tmp_path / "made-by").iterdir())) == 1
