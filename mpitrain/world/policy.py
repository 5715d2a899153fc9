"""What a World asks of the strategy of its ranks, and which one it has where nothing else is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol


class Policy(Protocol):
    """The part of `strategies.strategy.Strategy` that is asked for here: strategies stand above Worlds."""

    @property
    def exchanges(self) -> bool:
        """Whether gradients of this rank go anywhere."""
        ...

    def leave(self) -> object:
        """Collective: at the end of the program; returns when all ranks have come to theirs."""
        ...

    def on_shrink(self) -> object:
        """Local: ranks were lost, perhaps in the middle of an update; the World has those that are left."""
        ...


MakePolicy = Callable[[Any], Policy]


def by_size(world: Any) -> Policy:
    """Local: all-reduce, or for one rank nothing. By name, because no import points up; none of it loads TensorFlow."""
    name, kind = ("all_reduce", "AllReduce") if world.size > 1 else ("local", "Local")
    policy: Policy = getattr(importlib.import_module(f"mpitrain.strategies.{name}"), kind)(world)
    return policy
