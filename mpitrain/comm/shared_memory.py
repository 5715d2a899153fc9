"""MPI's shared memory loses its name as soon as it needs none: then nothing of it is left, however a rank ends."""

from __future__ import annotations

import contextlib
from pathlib import Path

# MPICH opens this once, in MPI_Init, and removes it in MPI_Finalize only, to which a rank that is killed does not come
# (seen with 5.0.2). Open MPI's have the names by which ranks find each other later; its launcher removes them.
PREFIX = "/dev/shm/mpich_shm_"


def remove_names(maps: Path = Path("/proc/self/maps"), prefix: str = PREFIX) -> None:
    """Local, when all ranks have come out of MPI_Init: the memory stays until the last rank of this host has ended."""
    with contextlib.suppress(OSError):
        for line in maps.read_text().splitlines():
            name = line.partition(prefix)[2]
            if name and not name.endswith(" (deleted)"):
                Path(prefix + name).unlink(missing_ok=True)
