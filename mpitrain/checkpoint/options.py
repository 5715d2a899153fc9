"""When checkpoints are written, and where a run goes on. No TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError

EVERY = re.compile(r"epoch|([1-9]\d*) ?(steps?|s|min|h)")
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Options:
    """What the user can choose.

    Attributes:
        directory: of the checkpoints of this run; on the host of rank 0.
        every: `epoch`, or a number of steps or of time, as in `500steps`, `30s`, `10min`, `2h`.
        keep: how many of the newest are kept.
        best: metric whose best checkpoint is kept too; `val_loss`, or `loss` without validation, by default.
        resume: `auto`, from the newest whole one in `directory`, if there is one; `never`; or the path of one.
        grace_seconds: from a signal to the end of the job.
        run: what the numbers of a run follow from, by names for the user; told where a run that goes on has others.
    """

    directory: Path
    every: str = "epoch"
    keep: int = 3
    best: str | None = None
    resume: str = AUTO
    grace_seconds: float = 30.0
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if EVERY.fullmatch(self.every) is None:
            raise UsageError(
                f"a checkpoint every {self.every!r} is not understood: write epoch, or as in 500steps or 10min"
            )
        if self.keep < 1:
            raise UsageError(f"{self.keep} checkpoints are to be kept: keep at least 1")
        if not 0 < self.grace_seconds <= 86400:
            raise UsageError(f"the time of grace is {self.grace_seconds} s: give more than 0, and at most a day")

    @property
    def every_steps(self) -> int | None:
        """Steps from one checkpoint to the next, where they are counted in steps."""
        return self._number if self._unit.startswith("step") else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds from one checkpoint to the next, where they are counted in time."""
        return self._number * SECONDS[self._unit] if self._unit in SECONDS else None

    @property
    def _number(self) -> int:
        match = EVERY.fullmatch(self.every)
        return int(match[1] or 0) if match else 0

    @property
    def _unit(self) -> str:
        match = EVERY.fullmatch(self.every)
        return (match[2] or "") if match else ""


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        epoch: the epoch that is under way or comes next, from 0.
        step: steps of it that are done.
        samples: samples of its global order that are done, by all ranks; 0 where that is not known.
        steps: steps of all epochs.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}" + (f", after {self.step} steps of it" if self.step else "")

    def as_info(self) -> dict[str, Any]:
        """Local: as JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class Dealt:
    """How samples are dealt out to the ranks, where that is known.

    Attributes:
        samples: of an epoch.
        per_step: of all ranks, in one step.
        seed: from which, with the number of the epoch and that of samples, their order follows.
    """

    samples: int
    per_step: int
    seed: int
