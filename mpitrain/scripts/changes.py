"""What is different from a run under plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

PARTS = ("model", "optimizer", "data", "callbacks", "files", "other")


@dataclass
class Changes:
    """The table of what is different from a run under plain Python."""

    rows: list[tuple[str, str]] = field(default_factory=list)  # (part, text), each once, in the order found

    def note(self, part: str, text: str) -> None:
        """Local: add a row, if it is new."""
        if (part, text) not in self.rows:
            self.rows.append((part, text))

    def __str__(self) -> str:
        """Local: the table as text, by part."""
        width = max(map(len, PARTS))
        ordered = [row for part in PARTS for row in self.rows if row[0] == part]
        return "\n".join(f"{part:<{width}}  {text}" for part, text in ordered) or "nothing is changed"
