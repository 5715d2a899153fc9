"""`mpitrain hosts convert`: a list of hosts in the words of another launcher."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from mpitrain.cli.main import main

GIVEN = "a slots=2\nb slots=1  # the second\n"
OPEN_MPI = "a slots=2\nb slots=1\n"


@pytest.mark.parametrize(
    ("dialect", "shown"),
    [("openmpi", "a slots=2\nb slots=1\n"), ("mpich", "a:2\nb:1\n"), (None, "a slots=2\nb slots=1\n")],
)
def test_convert(dialect: str | None, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text(GIVEN)
    assert main(["hosts", "convert", str(tmp_path / "hosts"), *(["--to", dialect] if dialect else [])]) == 0
    assert capsys.readouterr().out == shown


def test_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x:3\n"))
    assert main(["hosts", "convert", "-", "--to", "openmpi"]) == 0
    assert capsys.readouterr().out == "x slots=3\n"


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "convert", str(tmp_path / "absent")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mpitrain: ")
    assert told.count("\n") == 1
