"""Which engines there are, and how a World gets one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from mpitrain.collectives.engine import CollectiveEngine
from mpitrain.collectives.host_engine import HostEngine
from mpitrain.collectives.native_engine import NativeEngine, usable
from mpitrain.collectives.one_rank import OneRankEngine
from mpitrain.runtime import streams
from mpitrain.world import engine_choice
from mpitrain.world.world import World

ENGINES: dict[str, Callable[[World], CollectiveEngine]] = {
    "native": NativeEngine,
    "host": HostEngine,
    "one_rank": OneRankEngine,
}


def chosen(world: World) -> tuple[str, str]:
    """Local: the name of the engine that is used where the caller names none, and why.

    Raises:
        UsageError: MPITRAIN_ENGINE is not understood.
    """
    way = engine_choice.asked(os.environ)
    if world.size == 1:
        return "host", "there is one rank"
    if way != engine_choice.AUTO:
        name = "native" if way == engine_choice.NATIVE else "host"
        return name, f"{engine_choice.VARIABLE}={way}"
    found = usable(world)
    return ("host", found) if isinstance(found, str) else ("native", "it was built, and can be used here")


@functools.cache
def engine_of(world: World, name: str | None = None) -> CollectiveEngine:
    """Local: the one engine of these ranks that has this name; by default the fastest that can be used.

    Raises:
        UsageError: it cannot be used here.
    """
    if name is not None:
        return ENGINES[name](world)
    name, reason = chosen(world)
    if world.verbose and world.local_rank == 0:  # hosts may differ
        way = "machine code" if name == "native" else "Python"
        place = f"rank {world.rank} ({world.hosts[world.rank]})"
        streams.write_stderr(f"mpitrain: {place}: {way} exchanges what is to be combined: {reason}\n")
    return engine_of(world, name)
