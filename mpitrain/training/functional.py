"""The functions of the library that act on variables and data sets of the current job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.data import sharding
from mpitrain.strategies import replicas
from mpitrain.world.start import current_world
from mpitrain.world.world import World


def broadcast_variables(variables: Sequence[Any], root: int = 0, *, world: World | None = None) -> None:
    """Collective: every rank's variables become those of rank `root`. See `replicas.broadcast_variables`.

    Example:
        >>> mpitrain.broadcast_variables([tf.Variable([1.0, 2.0])])
    """
    replicas.broadcast_variables(variables, root, world=world or current_world())


def verify_replicas(variables: Sequence[Any], when: str = "now", *, world: World | None = None) -> None:
    """Collective: raise ReplicaError on every rank when variables differ. See `replicas.verify_replicas`.

    Example:
        >>> mpitrain.verify_replicas([tf.Variable([1.0, 2.0])], when="after the first step")
    """
    replicas.verify_replicas(variables, when, world=world or current_world())


def shard(dataset: Any, *, world: World | None = None) -> Any:
    """Local: this rank's elements of a `tf.data.Dataset`: every size-th, from its rank on.

    Call it on samples, before `batch`, and after a `shuffle` whose seed is the same on all ranks.

    Example:
        >>> samples = mpitrain.shard(tf.data.Dataset.range(3))
        >>> [int(sample) for sample in samples]
        [0, 1, 2]
    """
    group = world or current_world()
    return sharding.shard(dataset, group.rank, group.size)
