"""What workers and servers say to each other: numbers in front of arrays, so that nothing is pickled on the way.

A message is a header of float64, which holds whole numbers up to 2**53 exactly, and after it what its kind says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer
from mpitrain.world.agreement import REPORTS

# The position (see `Activity`) of servers, and of workers without data: for the watchdog these are never late.
NEVER_LATE = 1 << 40
ACTIVE, SAMPLES, REQUEST = 0, 1, 2  # columns of what is told of each worker; its report follows
COLUMNS = 3 + REPORTS
COMPRESSED = "float16"


class Kind(IntEnum):
    """What a worker says."""

    BEGIN = 1  # a new session: a text follows, and after the server's answer the values, from the first worker
    PUSH = 2  # one part of a gradient follows
    IDLE = 3  # this worker has no data until all are idle
    STOP = 4  # it has come to the end of its program
    STATE = 5  # it wants the parameters and slots: a text and arrays come back
    ROWS = 6  # it wants some rows of one part: their numbers follow
    COUNTS = 7  # it wants to know what was counted: a text comes back


class Status(IntEnum):
    """What a server answers."""

    OK = 0
    DROPPED = 1  # the gradient was too late, or too stale
    REFUSED = 2  # a text that says why follows


@dataclass(frozen=True)
class Message:
    """The header of what a worker says."""

    kind: Kind  # what it is
    session: int = 0  # of which optimizer
    part: int = 0  # position among the parts of an update
    version: int = 0  # updates that this worker has seen
    samples: float = 0.0  # behind the gradient; 0: it does not count
    learning_rate: float = float("nan")  # of the worker's optimizer; NaN where it follows a schedule
    count: int = 0  # rows, or bytes of the text, that follow
    position: int = 0  # collectives that this rank has entered, see `Activity.position`
    request: int = 0  # see `Agreement.request`
    report: tuple[float, ...] = (0.0,) * REPORTS  # see `Agreement.report`

    WORDS = 9 + REPORTS

    def pack(self) -> Buffer:
        """Local: as it travels."""
        return np.array(
            [
                *(self.kind, self.session, self.part, self.version, self.samples, self.learning_rate),
                *(self.count, self.position, self.request, *self.report),
            ],
            np.float64,
        )

    @classmethod
    def unpack(cls, words: Buffer) -> Message:
        """Local: what `pack` packed."""
        kind, session, part, version, samples, rate, count, position, request, *report = words.tolist()
        whole = (int(session), int(part), int(version))
        return cls(Kind(int(kind)), *whole, samples, rate, int(count), int(position), int(request), tuple(report))


@dataclass(frozen=True)
class Answer:
    """The header of what a server answers."""

    status: Status  # what became of it
    session: int  # of which optimizer
    part: int  # position among the parts of an update
    version: int  # updates that the server has made
    iterations: int  # of its optimizer
    count: int  # rows, bytes or sessions that follow
    samples: float  # behind all gradients so far
    position: int  # the highest of all workers, see `Message.position`
    workers: Buffer  # (workers, COLUMNS), what they told with the gradients of this update

    WORDS = 8

    def pack(self) -> Buffer:
        """Local: as it travels."""
        head = [self.status, self.session, self.part, self.version, self.iterations, self.count, self.samples]
        return np.concatenate([np.array([*head, self.position], np.float64), self.workers.reshape(-1)])

    @classmethod
    def words(cls, workers: int) -> int:
        """Local: how long it is."""
        return cls.WORDS + workers * COLUMNS

    @classmethod
    def unpack(cls, words: Buffer) -> Answer:
        """Local: what `pack` packed."""
        status, session, part, version, iterations, count, samples, position = words[: cls.WORDS].tolist()
        numbers = (int(session), int(part), int(version), int(iterations), int(count))
        return cls(Status(int(status)), *numbers, samples, int(position), words[cls.WORDS :].reshape(-1, COLUMNS))


def as_text(content: Any) -> Buffer:
    """Local: something that JSON can hold, as bytes."""
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


def from_text(content: Buffer) -> Any:
    """Local: what `as_text` was given."""
    return json.loads(content.tobytes().decode())


def travel_dtype(dtype: str, compression: str) -> np.dtype[Any]:
    """Local: in which an array travels."""
    return np.dtype(np.float16 if compression == COMPRESSED else dtype)
