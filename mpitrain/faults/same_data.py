"""Do ranks read the same samples? Told from checksums of their first batches, once."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.faults.activity import LOOKED_AT_BATCHES


class SameData:
    """Compares what all ranks have seen first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._batches: dict[int, tuple[int, ...]] = {}
        self._gradients: dict[int, tuple[int, ...]] = {}
        self._told = False

    def add(self, rank: int, batches: Sequence[int], gradients: Sequence[int]) -> None:
        """Local: checksums of the first batches of a rank, and of its first gradients."""
        self._batches[rank], self._gradients[rank] = tuple(batches), tuple(gradients)

    def verdict(self) -> str | None:
        """Local: the warning, once, when all ranks have been heard of and some read the same."""
        if self._told or len(self._batches) < self._size:
            return None
        seen = self._batches if all(self._batches.values()) else self._gradients
        what = "batches" if seen is self._batches else "gradients"
        if any(len(sums) < LOOKED_AT_BATCHES for sums in seen.values()):
            return None
        self._told = True
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, sums in sorted(seen.items()):
            # Batches that are all alike, as of constant test data, say nothing.
            if len(set(sums)) == len(sums):
                groups.setdefault(sums, []).append(rank)
        alike = [ranks for ranks in groups.values() if len(ranks) > 1]
        if not alike:
            return None
        names = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in alike)
        return (
            f"mpitrain: warning: {names} had the same first {LOOKED_AT_BATCHES} {what}: they read the same data, and "
            "do the same work. A script that knows nothing of ranks has its loops divided by --divide-loops; one that "
            "does gives each rank its share, as with mpitrain.shard(dataset) before batching, or other seeds for "
            "random data (MPITRAIN_SAME_DATA=ignore silences this)\n"
        )
