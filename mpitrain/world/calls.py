"""What ranks agree on before they do it: for each kind of call a small frozen dataclass."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass


class Call:
    """What all ranks do at one point of the program; base of frozen dataclasses, one for each kind.

    The fields are what ranks must have in common, and what one without data reads to take part with nothing: it gets
    the object pickled. `str` renders them for people, with every difference, the first line alone where one is enough.
    Of it the header's hash is taken, once for each object: what comes at every step is made once.
    """

    @functools.cached_property
    def signature(self) -> int:
        """A 62-bit hash, never 0 or 1."""
        # 0 and 1 stand for ranks without data, -1 for threads in each other's way (`agreement`). And no `hash`: Python
        # seeds that of a text anew in each process.
        digest = hashlib.blake2b(str(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (1 << 62) + 2


@dataclass(frozen=True)
class Meeting(Call):
    """All ranks come to the same place, of which nothing else needs to be known."""

    place: str  # for people

    def __str__(self) -> str:
        """Local: the place."""
        return self.place


@functools.lru_cache(maxsize=1024)
def meeting(place: str) -> Meeting:
    """Local: the one of that name."""
    return Meeting(place)
