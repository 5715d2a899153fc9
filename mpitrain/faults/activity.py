"""What this rank is doing, for the watchdog's thread to read.

Training writes it by plain assignment: no lock, no clock, no system call, so that it costs nothing beside
an exchange. The thread looks at it about twice a second, and finds out by itself how long nothing changed.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from mpitrain.errors import MpitrainError
from mpitrain.runtime.words import Word

Phase = Literal["start", "data", "compute", "exchange", "checkpoint", "evaluation", "callback", "end"]
PHASES: tuple[str, ...] = get_args(Phase)
# Long on one rank alone, and nothing wrong with it: loading data and tracing before the first update, saving,
# evaluating, and what stands after the training.
PATIENT_PHASES = ("start", "checkpoint", "evaluation", "end")
LOOKED_AT_BATCHES = 3
LONGEST_BYTES, LONGEST_TEXTS = 1 << 20, 1000  # of each array that a checksum is taken of


class Activity:
    """What one rank is doing.

    Attributes:
        position: collectives entered. All ranks enter the same ones in the same order, so a rank with a lower position
            than another has not come to where the other is.
        moved: messages of collectives that have arrived, where a collective is made of many.
        updates: gradient updates finished.
    """

    __slots__ = ("_inside", "batches", "bucket_of", "divided", "error", "gradients", "phase", "steps", "words")

    position = Word(0, int)
    moved = Word(1, int)
    updates = Word(2, int)
    _bucket = Word(3, int)  # the id of a bucket that machine code exchanges; 0 outside

    def __init__(self) -> None:
        self.words = np.zeros(4, np.int64)
        self.phase: Phase = "start"  # where in the program it is; while `inside` is set it waits for the others, too
        # finished steps of the whole training, with those of earlier processes; None where nobody counts them
        self.steps: int | None = None
        self._inside: Any = None
        self.bucket_of: Callable[[int], Any] = lambda number: None  # what `inside` is, by the id of a bucket
        self.batches: list[int] = []  # checksums of the first batches, where they are seen
        self.divided = False  # what ranks read is the same, and each is given its rows of it
        self.gradients: list[int] = []  # checksums of this rank's own gradients in the first updates
        # raised by an exchange within a graph, from where it comes out wrapped in TensorFlow's own
        self.error: MpitrainError | None = None

    @property
    def inside(self) -> Any:
        """The collective it is in: a text, or a plan of buckets with the number of one; None outside."""
        return self.bucket_of(self._bucket) if self._inside is None and self._bucket else self._inside

    @inside.setter
    def inside(self, inside: Any) -> None:
        self._inside = inside

    @property
    def progress(self) -> int:
        """How far it has come: steps, or else updates, that are finished."""
        return self.updates if self.steps is None else self.steps

    def note_batch(self, arrays: Sequence[Any]) -> None:
        """Local: what this rank reads."""
        if len(self.batches) < LOOKED_AT_BATCHES:
            self.batches.append(checksum(arrays))

    def note_gradients(self, update: int, arrays: Sequence[Any]) -> None:
        """Local: what this rank makes of it; in its first update ranks may start from other weights."""
        if update > 1 and not self.divided and len(self.gradients) < LOOKED_AT_BATCHES:
            self.gradients.append(checksum(arrays))

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Local: this rank is in `phase` until the context ends."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def checksum(arrays: Sequence[Any]) -> int:
    """Local: of numpy arrays, by their shapes and first bytes."""
    total = 0
    for array in arrays:
        if array.dtype.kind == "O":  # texts
            content = b"".join(bytes(str(item), "utf-8", "replace") for item in array.reshape(-1)[:LONGEST_TEXTS])
        else:
            content = array.reshape(-1)[: LONGEST_BYTES // max(1, array.itemsize)].tobytes()
        total = zlib.crc32(content, zlib.crc32(repr(array.shape).encode(), total))
    return total


def describe(inside: Any) -> str:
    """Local: one line about the collective that `Activity.inside` names."""
    if isinstance(inside, tuple):
        plan, index = inside
        return str(plan.describe_bucket(index))
    return str(inside).split("\n")[0][:200]
