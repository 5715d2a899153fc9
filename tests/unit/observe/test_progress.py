"""The progress display, on a terminal and off it."""

from __future__ import annotations

import io
import re
import time

import pytest

from mpitrain.observe import progress
from mpitrain.observe.progress import ProgressDisplay


def shown(columns: int) -> str:
    """Two epochs of 100 samples; the text written."""
    file = io.StringIO()
    display = ProgressDisplay(2, 100, file=file, columns=columns)
    for epoch in range(2):
        display.begin_epoch(epoch)
        time.sleep(progress.REFRESH_SECONDS)
        display.update(50, {"loss": 0.5, "accuracy": 0.75})
        display.end_epoch(100, {"loss": 0.25, "accuracy": 0.875, "val_loss": 1.0})
    display.close()
    return file.getvalue()


def test_plain_lines() -> None:
    lines = shown(0).splitlines()
    pattern = r"epoch {}/2  loss 0\.2500  accuracy 0\.8750  val_loss 1\.0000  [\d,]+ images/s"
    assert len(lines) == 2
    assert all(re.fullmatch(pattern.format(number), line) for number, line in enumerate(lines, 1))


def test_rate_counts_all_samples_of_the_epoch() -> None:
    rates = [int(rate) for rate in re.findall(r"(\d+) images/s", shown(0))]
    longest = 100 / progress.REFRESH_SECONDS
    assert all(longest / 3 < rate <= longest for rate in rates)


def written(columns: int) -> list[str]:
    """What a terminal of that width is sent, without its control sequences."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown(columns)))


@pytest.mark.parametrize("columns", [40, 80, 119, 200])
def test_a_terminal_keeps_the_lines_of_a_file(columns: int) -> None:
    def numbers(lines: list[str]) -> list[str]:
        return [line[: line.index("val_loss") + 15] for line in lines if "val_loss" in line]

    assert numbers(written(columns)) == numbers(shown(0).splitlines())
    assert len(numbers(written(columns))) == 2


@pytest.mark.parametrize("columns", [80, 200])
def test_bar_fits_the_terminal(columns: int) -> None:
    bars = [line for line in written(columns) if "━" in line]
    assert any("loss 0.5000  accuracy 0.7500" in line and "images/s" in line for line in bars)
    assert any(line.startswith("epoch 2/2") for line in bars)
    assert all(len(line) <= columns for line in bars)
