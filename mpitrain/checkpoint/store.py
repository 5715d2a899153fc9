"""The checkpoints of one run, in one directory. For rank 0 only; no TensorFlow.

Each has a number, one more than the last one's, so that the newest is known without a clock. Nothing is locked:
one run writes to a directory at a time.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import files
from mpitrain.checkpoint.files import DamagedError, ModelWriter, Snapshot
from mpitrain.errors import UsageError
from mpitrain.runtime.counted import counted

OTHERWISE = "name another checkpoint, or leave --resume out for the newest that is whole"
NAME = re.compile(r"checkpoint-(\d{6,})")
RISING = ("acc", "accuracy", "auc", "f1_score", "precision", "recall", "iou", "mean_iou")


@dataclass(frozen=True)
class Quality:
    """What decides which checkpoint is the best one."""

    metric: str  # its name
    value: float  # of the epoch at whose end the checkpoint was made

    @property
    def cost(self) -> float:
        """The lower, the better: Keras' names of accuracies rise, everything else falls. NaN is worst."""
        name = self.metric.removeprefix("val_")
        rises = name.endswith("accuracy") or name in RISING
        value = -self.value if rises else self.value
        return float("inf") if value != value else value


@dataclass(frozen=True)
class Store:
    """Where checkpoints are written to and found."""

    directory: Path  # made by `prepare` if need be
    keep: int = 3  # how many of the newest ones are kept; the best one is kept beside them

    def prepare(self) -> None:
        """Local: make the directory, see that it can be written to, and remove what a killed run left unfinished.

        Raises:
            UsageError: it cannot be made or written to.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=files.DIRECTORY_MODE)
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix=files.PART_PREFIX):
                pass
            for part in self.directory.glob(f"{files.PART_PREFIX}*"):
                shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            raise UsageError(
                f"no checkpoint can be written in {self.directory} ({error.strerror or error}): give another "
                "--checkpoint-dir"
            ) from error

    def paths(self) -> list[Path]:
        """Local: all checkpoints, oldest first, whether whole or not."""
        found = [(int(match[1]), path) for path in self.directory.iterdir() if (match := NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def newest(self, tell: Callable[[str], None]) -> tuple[Path, Snapshot] | None:
        """Local: the newest checkpoint that is whole; None where there is none at all.

        `tell` is given one line for each damaged one that is passed over.

        Raises:
            UsageError: there are checkpoints, but all are damaged.
        """
        paths = self.paths()
        for path in reversed(paths):
            snapshot = _read_or_tell(path, tell)
            if snapshot is not None:
                return path, snapshot
        if paths:
            raise UsageError(
                f"none of {counted(len(paths), 'checkpoint')} in {self.directory} is whole: give another "
                "--checkpoint-dir, or --resume never to begin anew"
            )
        return None

    def best(self) -> tuple[Path, Quality] | None:
        """Local: the checkpoint with the best metric, the older one of equals."""
        rated = [(path, quality) for path in self.paths() if (quality := _quality(path)) is not None]
        return min(rated, key=lambda pair: pair[1].cost) if rated else None

    def write(self, snapshot: Snapshot, write_model: ModelWriter | None = None) -> Path:
        """Local: a new checkpoint; then those that are neither new nor best are removed.

        Raises:
            OSError: it cannot be written; those that are there stay as they are.
        """
        paths = self.paths()
        number = int(NAME.fullmatch(paths[-1].name)[1]) + 1 if paths else 1  # type: ignore[index]
        path = self.directory / f"checkpoint-{number:06d}"
        files.write(path, snapshot, write_model)
        self._prune()
        return path

    def _prune(self) -> None:
        paths, best = self.paths(), self.best()
        for path in paths[: -self.keep]:
            if best is None or path != best[0]:
                # The manifest first: without it, what is left of it is no checkpoint.
                (path / files.MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)


def read_one(path: Path) -> Snapshot:
    """Local: the checkpoint that the user named.

    Raises:
        UsageError: it is none, or damaged.
    """
    try:
        return files.read(path)
    except DamagedError as error:
        raise UsageError(f"{path} cannot be resumed from: {error}: {OTHERWISE}") from error


def _read_or_tell(path: Path, tell: Callable[[str], None]) -> Snapshot | None:
    try:
        return files.read(path)
    except DamagedError as error:
        tell(f"checkpoint {path.name} is damaged and left out: {error}")
        return None


def _quality(path: Path) -> Quality | None:
    try:
        found: Mapping[str, Any] | None = files.read_info(path).get("quality")
        return None if found is None else Quality(str(found["metric"]), float(found["value"]))
    except (DamagedError, KeyError, TypeError, ValueError):
        return None
