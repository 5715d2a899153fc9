"""Where operations were asked to run, and where they ran, as a table. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mpitrain.runtime.columns import columns

TITLES = ("operation", "kind", "requested", "actual")
ANY = "any"


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        operation: its name, as TensorBoard shows it.
        kind: such as `MatMul`.
        requested: the device that the program named; empty for any.
        actual: that on which it ran.
    """

    operation: str
    kind: str
    requested: str
    actual: str


class Table:
    """What was seen, in the order in which it was first seen."""

    def __init__(self) -> None:
        self._rows: dict[Row, None] = {}

    def add(self, row: Row) -> None:
        """Local: an operation that is seen again, as in the next step, stands there once."""
        self._rows[row] = None

    def actual(self, operation: str) -> list[str]:
        """Local: where an operation ran, by its name; where none has that name, by the end of it behind a slash."""
        whole = [short(row.actual) for row in self if row.operation == operation]
        return whole or [short(row.actual) for row in self if row.operation.endswith(f"/{operation}")]

    def counts(self) -> dict[str, int]:
        """Local: how many operations ran on each device."""
        return dict(Counter(short(row.actual) for row in self))

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __str__(self) -> str:
        lines = [(row.operation, row.kind, short(row.requested) or ANY, short(row.actual)) for row in self]
        return columns(TITLES, lines)


def short(device: str) -> str:
    """Local: `/job:worker/task:1/CPU:0`, without what is the same everywhere.

    Args:
        device: as TensorFlow writes it; one of the process itself loses its job and task.
    """
    text = re.sub(r"/replica:\d+", "", device).replace("/device:", "/")
    return re.sub(r"^/job:localhost/task:0(?=/|$)", "", text)
