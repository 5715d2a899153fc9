"""What the doctor says: one sentence, how bad it is, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# Green: as it should be. Yellow: a job starts, but slower, or not in every way. Red: it does not start, or not finish.
Colour = Literal["green", "yellow", "red"]
WORST_FIRST: tuple[Colour, ...] = ("red", "yellow", "green")


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str  # what was looked at
    hosts: tuple[str, ...]  # where; nothing for what belongs to no host
    colour: Colour  # how bad it is
    sentence: str  # what was found
    remedy: str = ""  # the command that mends it, or what to do; nothing where all is well


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same thing found on several hosts is one finding; findings of one check stand together."""
    hosts: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, hosts=()), {}).update(dict.fromkeys(finding.hosts))
    order = list(dict.fromkeys(finding.check for finding in hosts))
    found = [replace(finding, hosts=tuple(names)) for finding, names in hosts.items()]
    return tuple(sorted(found, key=lambda finding: order.index(finding.check)))


def worst(findings: Sequence[Finding]) -> Colour:
    """The colour of all together."""
    colours = {finding.colour for finding in findings}
    return next((colour for colour in WORST_FIRST if colour in colours), "green")
