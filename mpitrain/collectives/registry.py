"""Which engines there are, and how a World gets one: `host`, unless the caller names another."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mpitrain.collectives.engine import CollectiveEngine
from mpitrain.collectives.host_engine import HostEngine
from mpitrain.collectives.one_rank import OneRankEngine
from mpitrain.world.world import World

ENGINES: dict[str, Callable[[World], CollectiveEngine]] = {"host": HostEngine, "one_rank": OneRankEngine}


@functools.cache
def engine_of(world: World, name: str = "host") -> CollectiveEngine:
    """Local: the one engine of these ranks that has this name."""
    return ENGINES[name](world)
