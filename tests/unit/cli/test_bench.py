"""The command line of `mpitrain bench`."""

from __future__ import annotations

import pytest

from mpitrain.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("step", "--models", "mlp50k,none"), "no model 'none'"),
        (("step", "--batch-size", "0"), "no positive whole number"),
        (("exchange", "--rate", "nan"), "no positive number"),
        (("exchange", "--mebibytes", "1,"), "no positive number"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("mpitrain: argument --")
    assert told.err.count("\n") == 1
    assert complaint in told.err
