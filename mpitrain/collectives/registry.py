"""Which engines there are, and how a World gets one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from mpitrain.collectives.engine import CollectiveEngine
from mpitrain.collectives.host_engine import HostEngine
from mpitrain.collectives.native_engine import NativeEngine, usable
from mpitrain.collectives.one_rank import OneRankEngine
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
    return ("host", found) if isinstance(found, str) else ("native", "machine code was built for it")


@functools.cache
def engine_of(world: World, name: str | None = None) -> CollectiveEngine:
    """Local: the one engine of these ranks that has this name; by default the fastest that can be used.

    Raises:
        UsageError: it cannot be used here.
    """
    return ENGINES[name](world) if name is not None else engine_of(world, chosen(world)[0])
