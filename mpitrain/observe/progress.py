"""What a training run shows while it runs: a line for each epoch, and on a terminal a bar below them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.1


class ProgressDisplay:
    """Shows the epochs of one run. For rank 0; the numbers it is given are those of all ranks.

    Args:
        epochs: how many there will be.
        samples_per_epoch: training samples of all ranks.
        unit: what the samples are called.
        file: where to write; standard output by default.
        columns: width of the terminal to draw a bar on; 0 for none; seen from `file` by default.
    """

    def __init__(
        self,
        epochs: int,
        samples_per_epoch: int,
        *,
        unit: str = "images",
        file: TextIO | None = None,
        columns: int | None = None,
    ) -> None:
        self._epochs, self._per_epoch, self._unit = epochs, samples_per_epoch, unit
        self._file = file or sys.stdout
        terminal = None if columns is None else columns > 0
        console = Console(file=self._file, force_terminal=terminal, width=columns or None, highlight=False)
        self._bar: Progress | None = None
        if console.is_terminal:
            # Drawn by `update` alone: a drawing thread would take the interpreter lock from the exchange.
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[numbers]}", markup=False),
                TimeRemainingColumn(compact=True),
                console=console,
                auto_refresh=False,
            )
        self._task: TaskID | None = None
        self._epoch = 0
        self._began = self._drawn = time.perf_counter()

    @property
    def is_bar(self) -> bool:
        """Whether `update` shows anything."""
        return self._bar is not None

    def begin_epoch(self, epoch: int) -> None:
        """Local: epoch number `epoch`, from 0, begins."""
        self._epoch, self._began = epoch, time.perf_counter()
        if self._bar is not None and self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._epochs * self._per_epoch, numbers="")
        self._draw(0.0, {})

    def update(self, samples: float, numbers: Mapping[str, float]) -> None:
        """Local: `samples` of this epoch are done by all ranks; drawn at most ten times a second."""
        if self._bar is not None and time.perf_counter() - self._drawn >= REFRESH_SECONDS:
            self._draw(samples, numbers)

    def end_epoch(self, samples: float, numbers: Mapping[str, float]) -> None:
        """Local: the epoch is over; its line stays, on a terminal above the bar and as long as it is."""
        rate = samples / max(time.perf_counter() - self._began, 1e-9)
        line = f"epoch {self._epoch + 1}/{self._epochs}  {self._text(numbers, rate)}"
        if self._bar is None:
            self._file.write(f"{line}\n")
            self._file.flush()
            return
        self._bar.console.print(line, markup=False, soft_wrap=True)
        self._draw(samples, {name: numbers[name] for name in numbers if not name.startswith("val_")})

    def close(self) -> None:
        """Local: leave the terminal as it was."""
        if self._bar is not None and self._task is not None:
            self._bar.stop()
            self._task = None

    def _draw(self, samples: float, numbers: Mapping[str, float]) -> None:
        if self._bar is None or self._task is None:
            return
        self._drawn = time.perf_counter()
        done = self._epoch * self._per_epoch + min(samples, self._per_epoch)
        fields: dict[str, Any] = {"description": f"epoch {self._epoch + 1}/{self._epochs}", "completed": done}
        if numbers:
            fields["numbers"] = self._text(numbers, samples / max(self._drawn - self._began, 1e-9))
        self._bar.update(self._task, **fields)
        self._bar.refresh()

    def _text(self, numbers: Mapping[str, float], rate: float) -> str:
        return "  ".join([*(f"{name} {value:.4f}" for name, value in numbers.items()), f"{rate:,.0f} {self._unit}/s"])
