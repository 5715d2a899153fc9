"""Which ranks write a file: the first of those that give it the same name. No TensorFlow.

A name may hold the time, a random number or a process's, or how many files were there before. Ranks then give
different ones, and each will look for the file under its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mpitrain.comm.communicator import Communicator


class Names:
    """What this rank writes while ranks do not wait for each other."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._own: list[re.Pattern[str]] = []

    def compare(self, paths: Sequence[Sequence[str]]) -> bool:
        """Collective: learn which names this rank gives otherwise than all ranks before it.

        Args:
            paths: groups of names, or patterns such as `{epoch}.keras`; a group of other length is left out.

        Returns:
            Whether some ranks give other names than others.
        """
        everyone = self._communicator.all_gather_obj(paths)
        for position, group in enumerate(paths):
            before = [one[position] for one in everyone[: self._communicator.rank] if len(one) == len(paths)]
            before = [one for one in before if len(one) == len(group)]
            for index, mine in enumerate(group):
                others = [one[index] for one in before]
                # Where a rank before this one has the same name, that one writes.
                if others and mine not in others:
                    self._own.append(_place(mine, others[0]))
        return any(one != paths for one in everyone)

    def written_here(self, paths: Sequence[str]) -> bool:
        """Local: whether this rank is the one that writes these."""
        return self._communicator.rank == 0 or any(own.match(path) for own in self._own for path in paths)


def paths_in(values: Iterable[Any]) -> tuple[str, ...]:
    """Local: what may be names of files among arguments or attributes."""
    told = (getattr(one, "directory", one) for one in values)  # of a CheckpointManager
    return tuple(os.fsdecode(one) for one in told if isinstance(one, str | bytes | os.PathLike))


def paths_of(callbacks: Sequence[Any]) -> list[tuple[str, ...]]:
    """Local: what may be names of files that these callbacks write."""
    return [paths_in(vars(callback).values()) for callback in callbacks]


def _place(mine: str, other: str) -> re.Pattern[str]:
    """Local: all that lies where the name `mine` is not the same as `other`: `runs/5` for `runs/5/a` and `runs/4/a`."""
    parts, theirs = mine.split("/"), other.split("/")  # and no Path, which makes another of "./a"
    while len(parts) > 1 and len(theirs) > 1 and parts[-1] == theirs[-1]:
        parts.pop()
        theirs.pop()
    pattern = re.sub(r"\\\{.*?\\\}", "[^/]*", re.escape("/".join(parts)))
    return re.compile(f"{pattern}(?:/|$)")
