"""The functions of the library that act on variables and data sets of the current job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.data import sharding
from mpitrain.errors import AgreedError
from mpitrain.strategies import replicas
from mpitrain.world.start import current_world
from mpitrain.world.world import World


def broadcast_variables(variables: Sequence[Any], root: int = 0, *, world: World | None = None) -> None:
    """Collective: every rank's variables become those of rank `root`.

    Args:
        variables: Keras or TensorFlow variables, in the same order on all ranks.
        root: rank whose values are taken.
        world: the job; the current one by default.

    Raises:
        MismatchError: ranks have different variables.

    Example:
        >>> mpitrain.broadcast_variables([tf.Variable([1.0, 2.0])])
    """
    replicas.broadcast_variables(variables, root, world=world or current_world())


def verify_replicas(variables: Sequence[Any], when: str = "now", *, world: World | None = None) -> None:
    """Collective: check that variables are bit-identical on all ranks.

    Args:
        variables: in the same order on all ranks.
        when: for the message, as in "after epoch 3".
        world: the job; the current one by default.

    Raises:
        ReplicaError: on every rank, naming the first variable that differs and the ranks.

    Example:
        >>> mpitrain.verify_replicas([tf.Variable([1.0, 2.0])], when="after the first step")
    """
    replicas.verify_replicas(variables, when, world=world or current_world())


def shard(dataset: Any, *, world: World | None = None) -> Any:
    """Collective: this rank's elements of a `tf.data.Dataset`: every size-th, from its rank on.

    Args:
        dataset: of samples, before `batch`, and after a `shuffle` whose seed is the same on all ranks.
        world: the job; the current one by default.

    Raises:
        AgreedError: on all ranks: each shuffles in its own order, and would take samples that others take too.

    Example:
        >>> samples = mpitrain.shard(tf.data.Dataset.range(3))
        >>> [int(sample) for sample in samples]
        [0, 1, 2]
    """
    group = world or current_world()
    own = sharding.shuffle_seeds(dataset)
    group.agreement.call("shard of a dataset")
    everyone = group.communicator.all_gather_obj(own)
    unlike = [rank for rank, seeds in enumerate(everyone) if seeds != everyone[0]]
    if unlike or (group.size > 1 and (0, 0) in own):
        how = f"with other seeds on {group.agreement.name(unlike)} than on rank 0" if unlike else "without a seed"
        raise AgreedError(
            f"mpitrain.shard: the dataset is shuffled {how}, so that each rank takes samples that others take too: "
            "give shuffle a seed that is the same on all ranks (list_files shuffles, too), or shuffle what shard gives"
        )
    return sharding.shard(dataset, group.rank, group.size)
