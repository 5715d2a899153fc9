"""The progress display, on a terminal and off it."""

from __future__ import annotations

import io
import re
import time

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


def test_bar() -> None:
    text = shown(200)
    assert "━" in text
    assert "loss 0.5000  accuracy 0.7500" in text
    assert "val_loss 1.0000" in text
    assert "epoch 2/2" in text


def test_bar_fits_a_narrow_terminal() -> None:
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown(80))
    assert "images/s" in text
    assert "val_loss" not in text
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", text))
