"""What parameter servers counted during a run, for its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitrain.runtime.counted import counted
from mpitrain.strategies.parameter_server.worker_optimizer import served_of
from mpitrain.world.world import World

MOST_COLUMNS = 8


@dataclass(frozen=True)
class ServerCounts:
    """What one server counted, which stands for all."""

    updates: int  # that were made
    dropped: int  # gradients that did not count
    staleness: dict[int, int]  # how many gradients were of parameters so many updates old; in async mode

    def text(self) -> str:
        """Local: one line."""
        found = [counted(self.updates, "update")]
        if self.dropped:
            found.append(f"{counted(self.dropped, 'gradient')} dropped")
        if self.staleness:
            total = sum(self.staleness.values())
            mean = sum(age * count for age, count in self.staleness.items()) / total
            found.append(f"staleness {histogram(self.staleness)} (mean {mean:.2f})")
        return ", ".join(found)


def histogram(counts: dict[int, int]) -> str:
    """Local: shares, as in "0: 12%, 1: 80%, 2+: 8%"."""
    total = sum(counts.values())
    shown = sorted(counts)[:MOST_COLUMNS]
    rest = sum(count for age, count in counts.items() if age > shown[-1])
    last = [f"{shown[-1] + 1}+: {rest / total:.0%}"] if rest else []
    return ", ".join([f"{age}: {counts[age] / total:.0%}" for age in shown] + last)


def server_counts(model: Any, world: World) -> ServerCounts | None:
    """Collective: the counts of the server of the last part; None where gradients are averaged by all ranks."""
    served = served_of(model.optimizer)
    if served is None:
        return None
    told: dict[str, Any] = world.communicator.broadcast_obj(served.counts() if world.is_root else None)
    staleness = {int(age): count for age, count in told.get("staleness", {}).items()}
    return ServerCounts(told.get("updates", 0), sum(told.get("dropped", {}).values()), staleness)
