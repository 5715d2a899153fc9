"""The command horovodrun: scripts for Horovod end with the same numbers on 1, 2 and 3 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.launch.conftest import REPOSITORY, SHARED

PROGRAM = REPOSITORY / "tests" / "scripts" / "horovod" / "tutorials.py"


@pytest.fixture(scope="module", params=[SHARED])
def one() -> dict[str, list[float]]:
    return ended_with(1)


def ended_with(ranks: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "mpitrain.cli.horovodrun", "-np", str(ranks), "python", str(PROGRAM)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.mpich), 3])
def test_as_many_ranks_as_one(one: dict[str, list[float]], ranks: int) -> None:
    several = ended_with(ranks)
    assert {name: len(numbers) for name, numbers in one.items()} == {
        "keras_fit": 10,
        "tape": 14,
        "elastic": 5,
        "tensorflow_1": 2,
    }
    for name, numbers in one.items():
        np.testing.assert_allclose(several[name], numbers, rtol=1e-12, atol=1e-12, err_msg=name)
