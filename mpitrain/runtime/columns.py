"""Rows of text in columns, for tables that a terminal shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Each row in a line, each cell as wide as the widest of its column."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
