"""Texts hash alike on all ranks of a job: a rank begins anew with the one seed, unless the user has chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpitrain.runtime import string_hashes

PROGRAM = """
import os, sys
from mpitrain.runtime import string_hashes
print("begun", flush=True)
string_hashes.share_seed()
print(hash("a text"), os.environ.get("PYTHONHASHSEED"), sys.argv[1:])
"""
RANK = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


def run(**variables: str) -> list[str]:
    launchers = ("OMPI_", "PMI", "MPI_", "SLURM_", "PYTHONHASHSEED")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--its", "arguments"],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return finished.stdout.splitlines()


def test_a_rank_begins_anew_once() -> None:
    first, second = run(**RANK), run(**RANK)
    assert first == second
    assert first[:2] == ["begun", "begun"]
    assert first[2].endswith(" 0 ['--its', 'arguments']")


@pytest.mark.parametrize("variables", [{}, {**RANK, "OMPI_COMM_WORLD_SIZE": "1"}, {**RANK, "PYTHONHASHSEED": "7"}])
def test_others_go_on_as_they_are(variables: dict[str, str]) -> None:
    begun, said = run(**variables)
    assert begun == "begun"
    assert said.endswith(f" {variables.get('PYTHONHASHSEED')} ['--its', 'arguments']")


def test_the_seed_of_the_user_is_kept() -> None:
    assert string_hashes.seed({"HOME": "/"}) == {"PYTHONHASHSEED": "0"}
    assert string_hashes.seed({"PYTHONHASHSEED": "random"}) == {}
