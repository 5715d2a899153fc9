"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Local: such as `1 class`, `2 classes` and `1,200 samples`; of a phrase the last word is the noun."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch", "x")) else "s"
    return f"{number:,} {noun}{ending}"
