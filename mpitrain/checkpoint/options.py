"""When checkpoints are written, and where a run goes on. No TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.config import MOST, check_values, option
from mpitrain.runtime.counted import counted

EVERY = r"epoch|([1-9]\d*) ?(steps?|s|min|h)"
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class CheckpointOptions:
    """When the state of a run is saved, and where a run goes on.

    Attributes:
        directory: of the checkpoints of this run; on the host of rank 0.
        run: what the numbers of a run follow from, by names for the user; told where a run that goes on has others.

    Example:
        >>> options = mpitrain.callbacks.CheckpointOptions(directory, every="500steps")
        >>> options.every_steps
        500
    """

    directory: Path = Path("checkpoints")
    every: str = option(
        "epoch",
        "write a checkpoint so often: epoch, or as in 500steps, 10min",
        name="checkpoint_every",
        pattern=(EVERY, "epoch, or as in 500steps or 10min"),
        metavar="WHEN",
    )
    keep: int = option(3, "newest checkpoints to keep, beside the best", name="checkpoint_keep", least=1, below=MOST)
    best: str | None = option(
        None,
        "metric of the best checkpoint; else val_loss, or loss without validation",
        name="checkpoint_best",
        metavar="NAME",
    )
    resume: str = option(
        AUTO, "auto: from the newest whole checkpoint there is; never; or the path of one", metavar="WHICH"
    )
    grace_seconds: float = option(
        30.0,
        "seconds from SIGTERM, SIGUSR1 or Ctrl-C to the end, with a checkpoint",
        name="grace",
        positive=True,
        below=86400,
    )
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(self)

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
        match = re.fullmatch(EVERY, self.every)
        return int(match[1] or 0) if match else 0

    @property
    def _unit(self) -> str:
        match = re.fullmatch(EVERY, self.every)
        return (match[2] or "") if match else ""


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    epoch: int = 0  # the epoch that is under way or comes next, from 0
    step: int = 0  # steps of it that are done
    samples: int = 0  # samples of its global order that are done, by all ranks; 0 where that is not known
    steps: int = 0  # steps of all epochs

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}" + (f", after {counted(self.step, 'step')} of it" if self.step else "")

    def as_info(self) -> dict[str, Any]:
        """Local: as JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class Dealt:
    """How samples are dealt out to the ranks, where that is known."""

    samples: int  # of an epoch
    per_step: int  # of all ranks, in one step
    seed: int  # from which, with the number of the epoch and that of samples, their order follows
