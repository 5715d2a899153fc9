"""Samples that are the rows of a `.csv` file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.arrays import array_samples, as_inputs
from mpitrain.data.labels import Task, as_labels
from mpitrain.data.source import DataSource, Share, assemble
from mpitrain.errors import DataError

LABEL_NAMES = ("label", "target", "class", "y")
CLASS_NAMES = ("label", "class")


def load_csv(path: Path, share: Share, task: Task, num_classes: int | None) -> DataSource:
    """Local: one sample a row, below a header.

    The label is the column named label, target, class or y, else the last.
    A column named label or class holds class numbers; one of another name holds quantities as soon as it has
    a fraction.

    Raises:
        DataError: the file cannot be used; the message names line and column.
    """
    header, values = read_table(path)
    column = next((i for i, name in enumerate(header) if name.strip().lower() in LABEL_NAMES), len(header) - 1)
    name = header[column].strip()
    if task == "auto" and name.lower() in CLASS_NAMES:
        task = "classification"
    y, classes = as_labels(values[:, column], f"{path}, column {name}", task, num_classes)
    x = as_inputs(np.delete(values, column, axis=1), str(path))
    return assemble(array_samples(x, y), share, num_classes=classes, description=str(path))


def read_table(path: Path) -> tuple[list[str], NDArray[np.float64]]:
    """Header and cells of a csv file; comma, semicolon or tab separate the cells.

    Raises:
        DataError: there is no header, no row, a row of another length, or a cell that is not a number.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            rows = csv.reader(file, delimiter=max(",;\t", key=first.count))
            header = next(rows, [])
            _check_header(header, path)
            flat = np.fromiter(_cells(rows, header, path), np.float64)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as csv ({error}): save it as text in UTF-8, comma-separated") from error
    if not flat.size:
        raise DataError(f"{path} has a header but no rows: give one sample a row")
    return header, flat.reshape(-1, len(header))


def _check_header(header: Sequence[str], path: Path) -> None:
    if not header:
        raise DataError(f"{path} is empty or begins with an empty line: begin with a line of column names")
    if any(_is_number(cell) for cell in header):
        raise DataError(f"{path} has no header: begin with a line of column names (its first line holds numbers)")
    if len(header) < 2:
        raise DataError(f"{path} has one column ({header[0]}): give at least one input column and a label column")


def _cells(rows: Any, header: Sequence[str], path: Path) -> Iterator[float]:
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {rows.line_num} has {len(row)} cells, the header {len(header)}: make them equal"
            )
        try:
            yield from map(float, row)
        except ValueError:
            column = next(i for i, cell in enumerate(row) if not _is_number(cell))
            raise DataError(
                f"{path}, line {rows.line_num}, column {header[column].strip()}: {row[column]!r} is not a "
                "number: encode text "
                "as numbers and fill or remove empty cells"
            ) from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
