"""Samples that are the rows of a table in text: `.csv` or `.tsv`, perhaps packed with gzip."""

from __future__ import annotations

import contextlib
import csv
import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.arrays import array_samples, first_not_finite
from mpitrain.data.labels import Task, as_labels, some
from mpitrain.data.source import DataSource, Meaning, Share, assemble
from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted

LABEL_NAMES = ("label", "target", "class", "y")
CLASS_NAMES = ("label", "class")
# A first column of such a name that counts the rows is no feature.
INDEX_NAMES = ("", "unnamed: 0", "index", "idx", "id", "row", "no", "nr", "number")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LOOKED_AT = 5  # lines that tell the separator
MISSING = ("", "na", "n/a", "nan", "null", "none", "nil", "?", "-", "#n/a")
WORDS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True)
class Table:
    """A table as it was read."""

    inputs: tuple[str, ...]  # names of the columns that are features
    values: NDArray[np.float32]  # of these, shape (rows, columns), float32
    label: str  # name of the column to predict
    labels: NDArray[Any]  # its cells, numbers if all are, else texts
    lines: NDArray[np.int64]  # for each row its line in the file, from 1
    reading: str  # how the file was understood, for the user


def load_csv(path: Path, share: Share, task: Task, num_classes: int | None) -> DataSource:
    """Local: one sample a row, below a header.

    The label is the column named label, target, class or y, else the last. It may hold texts, which are classes. A
    column named label or class holds class numbers; one of another name holds quantities as soon as it has a fraction.

    Raises:
        DataError: the file cannot be used; the message names line and column.
    """
    table = read_table(path)
    if task == "auto" and table.label.lower() in CLASS_NAMES:
        task = "classification"
    name = f"{path}, column {table.label}"
    labels = as_labels(table.labels, name, task, num_classes, place=lambda row: f"line {table.lines[row]}")
    return assemble(
        array_samples(table.values, labels.values),
        share,
        num_classes=labels.num_classes,
        description=str(path),
        meaning=Meaning(
            f"{counted(len(table.inputs), 'column')}, {some(table.inputs)}; {table.reading}",
            f"column {table.label}, {labels.meaning}",
            labels.class_names,
        ),
    )


def read_table(path: Path) -> Table:
    """Header and cells of a table; commas, semicolons, tabs or bars separate the cells.

    Raises:
        DataError: there is no header, no row, a row of another length, or a cell that is not a number.
    """
    try:
        with _opened(path) as file:
            separator = _separator(file)
            file.seek(0)
            return _table(csv.reader(file, delimiter=separator), path, f"separated by {SEPARATORS[separator]}")
    except UnicodeError as error:
        where = _not_utf8(path) if getattr(error, "encoding", "") == "utf-8" else ""
        raise DataError(f"{path}{where} cannot be read as csv ({error}): save it as text in UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}): copy it again, or pack it with gzip") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as csv ({error}): save it as text in UTF-8, comma-separated") from error


def _opened(path: Path) -> TextIO:
    """A text in UTF-8, or in UTF-16 where it begins with the mark of that."""
    with _unpacked(path) as file:
        start = file.read(2)
    # `-sig` drops the mark that some programs begin UTF-8 with, which would be part of the first name.
    encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", newline="", encoding=encoding)
    # `newline=""`, as the `csv` module asks: a cell in quotes may hold a line break.
    return path.open(newline="", encoding=encoding)


def _unpacked(path: Path) -> Any:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _not_utf8(path: Path) -> str:
    """The first line that is none, for messages."""
    with contextlib.suppress(OSError, EOFError, zlib.error), _unpacked(path) as file:
        return next((f", line {number}" for number, line in enumerate(file, 1) if not _is_utf8(line)), "")
    return ""


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeError:
        return False
    return True


def _separator(file: TextIO) -> str:
    """What cuts the first lines into most cells, equally many in each."""
    lines = [line for line in (file.readline() for _ in range(LOOKED_AT)) if line.strip()]

    def fits(separator: str) -> tuple[bool, int]:
        counts = [len(next(csv.reader([line], delimiter=separator), [])) for line in lines] or [0]
        return len(set(counts)) == 1 and counts[0] > 1, counts[0]

    return max(SEPARATORS, key=fits)


def _table(rows: Any, path: Path, reading: str) -> Table:
    header = [name.strip() for name in next((row for row in rows if row), [])]
    first: list[str] = next((row for row in rows if row), [])
    _check_header(header, first, path)
    label = _label_column(header, path)
    # No lists of numbers: 8 bytes a cell in place of 32.
    cells, lines, labels = array("d"), array("q"), []
    for row in _with(first, rows):
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {rows.line_num} has {len(row)} cells, the header {len(header)}: make them equal, and "
                "put quotes around a cell that holds the separator"
            )
        labels.append(row.pop(label).strip())
        cells.extend(_numbers(row, [*header[:label], *header[label + 1 :]], rows.line_num, path))
        lines.append(rows.line_num)
    if not lines:
        raise DataError(f"{path} has a header but no rows: give one sample a row")
    names = [*header[:label], *header[label + 1 :]]
    # Beyond float32 is infinite, and told of with line and column below.
    with np.errstate(over="ignore"):
        values = np.frombuffer(cells).reshape(len(lines), -1).astype(np.float32)
    at = np.frombuffer(lines, np.int64)
    kept, left_out = _features(names, values, path)
    _check_finite(values[:, kept], [names[column] for column in kept], at, path)
    reading += f", {len(left_out)} left out: {some(left_out)}" if left_out else ""
    inputs = tuple(names[column] for column in kept)
    return Table(inputs, values[:, kept], header[label], _labels(labels, header[label], at, path), at, reading)


def _with(first: list[str], rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows that are not empty."""
    if first:
        yield first
    yield from (row for row in rows if row)


def _check_header(header: Sequence[str], first: Sequence[str], path: Path) -> None:
    if not header:
        raise DataError(f"{path} is empty: begin with a line of column names")
    if len(header) < 2 < len(first) + 1:
        raise DataError(
            f"{path}: the first line has one cell ({header[0]}), the next {len(first)}: begin with the line of column "
            "names"
        )
    if len(header) < 2:
        raise DataError(f"{path} has one column ({header[0]}): give at least one input column and a label column")
    numbers = [_number(cell) is not None for cell in header]
    above_numbers = any(_number(cell) is not None and not number for cell, number in zip(first, numbers, strict=False))
    if any(numbers) and not above_numbers:
        raise DataError(f"{path} has no header: begin with a line of column names (its first line holds numbers)")
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns named {twice}: give each a name of its own")


def _label_column(header: Sequence[str], path: Path) -> int:
    found = [column for column, name in enumerate(header) if name.lower() in LABEL_NAMES]
    if len(found) > 1:
        names = " and ".join(header[column] for column in found)
        raise DataError(f"{path} has the columns {names}, of which each may be the label: rename or remove one")
    # The last that has a name: where lines end with a separator there is one more, which is empty.
    return found[0] if found else max(column for column, name in enumerate(header) if name or not column)


def _numbers(row: Sequence[str], names: Sequence[str], line: int, path: Path) -> list[float]:
    try:
        if "_" not in "".join(row):  # which Python takes within a number
            return list(map(float, row))
    except ValueError:
        pass
    return [_cell(cell, name, line, path) for cell, name in zip(row, names, strict=True)]


def _cell(cell: str, name: str, line: int, path: Path) -> float:
    number = _number(cell)
    if number is not None:
        return number
    if not name and not cell.strip():
        return 0.0  # of a column that every line ends with, perhaps; see `_features`
    word = cell.strip()
    if word.lower() in MISSING:
        hint = "fill in what is missing, or remove the line"
    elif re.fullmatch(r"[-+$€£]*[\d.,'\u00a0\u202f ]+[%€$£]?", word):
        hint = "write numbers with a point before the fraction and nothing else, as in 1017.5"
    else:
        hint = "encode text as numbers, or remove the column"
    column = f"column {name}" if name else "in a column without a name"
    raise DataError(f"{path}, line {line}, {column}: {cell!r} is not a number: {hint}")


def _number(cell: str) -> float | None:
    word = cell.strip()
    try:
        return float(word) if "_" not in word else None
    except ValueError:
        return WORDS.get(word.lower())


def _features(names: Sequence[str], values: NDArray[np.float32], path: Path) -> tuple[list[int], list[str]]:
    """The columns that are features, and what the others are called."""
    kept, left_out = [], []
    for column, name in enumerate(names):
        counts = not column and bool((np.diff(values[:, column]) == 1).all()) and values[0, column] in (0, 1)
        if counts and name.lower() in INDEX_NAMES:
            left_out.append(f"{name or 'the first'}, which counts the rows")
        elif not name and not values[:, column].any():
            left_out.append("one without name and values")
        elif not name:
            raise DataError(f"{path}: column {column + 1} has no name: give it one, or remove the column")
        else:
            kept.append(column)
    if not kept:
        raise DataError(f"{path} has no column but the label: give at least one input column")
    return kept, left_out


def _check_finite(values: NDArray[np.float32], names: Sequence[str], lines: NDArray[np.int64], path: Path) -> None:
    row = first_not_finite(values)
    if row is None:
        return
    column = int(np.argmin(np.isfinite(values[row])))
    raise DataError(
        f"{path}, line {lines[row]}, column {names[column]} is not finite (NaN, infinite, or beyond float32): fill in "
        "what is missing, or remove the line"
    )


def _labels(cells: list[str], name: str, lines: NDArray[np.int64], path: Path) -> NDArray[Any]:
    """Numbers if all are, else texts."""
    numbers = [None if cell.lower() in WORDS else _number(cell) for cell in cells]
    wrong = next((row for row, cell in enumerate(cells) if cell.lower() in MISSING), None)
    if wrong is not None:
        raise DataError(
            f"{path}, line {lines[wrong]}, column {name}: there is no label ({cells[wrong]!r}): fill it in, or remove "
            "the line"
        )
    texts = [row for row, number in enumerate(numbers) if number is None]
    if texts and len(texts) < len(cells):
        raise DataError(
            f"{path}, line {lines[texts[0]]}, column {name}: {cells[texts[0]]!r} is not a number, as other labels are: "
            "give numbers only, or texts only"
        )
    return np.asarray(cells if texts else numbers)
