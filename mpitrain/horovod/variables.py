"""Variables and Python objects of all ranks, and the end of a rank's data, under Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives import objects
from mpitrain.collectives.ordering import host_call, in_turn
from mpitrain.horovod.basics import world
from mpitrain.horovod.operations import broadcast
from mpitrain.horovod.process_sets import ProcessSet, global_process_set, member, position, told
from mpitrain.strategies import replicas
from mpitrain.strategies.strategy import strategy_of

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "join"]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Collective: variables become those of global rank `root_rank`.

    Returns:
        None where steps run eagerly; in a graph the operation that does it.
    """
    variables = list(variables)
    if tf.executing_eagerly():
        told(replicas.broadcast_variables, variables, position(process_set, root_rank), world=member(process_set))
        return None
    assigned = [variable.assign(broadcast(variable, root_rank, process_set=process_set)) for variable in variables]
    return tf.group(*[one for one in assigned if one is not None])


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Collective, and at once, in graphs of TensorFlow 1 too: rank `root_rank`'s object, pickled."""
    root = position(process_set, root_rank)
    return told(objects.broadcast_obj, obj, root, world=member(process_set))


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Local: a function that broadcasts the object it is given."""
    return lambda obj: broadcast_object(obj, root_rank, process_set=process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collective, and at once: every rank's object, in rank order."""
    return list(told(objects.all_gather_obj, obj, world=member(process_set)))


def join() -> Any:
    """Collective: this rank has no more data; take part in what the others do until all have joined.

    It takes part in updates, in `allreduce` with zeros (Average still divides by the number of all ranks) and in
    `allgather` with no rows.

    Returns:
        The last rank that joined, as a tensor; of several at once the highest.
    """
    if tf.executing_eagerly():
        return tf.constant(told(_join), tf.int32)
    (joined,) = in_turn(world().communicator, lambda: host_call(lambda: np.int32(_join()), [], [tf.int32]))
    joined.set_shape([])
    return joined


def _join() -> int:
    made = strategy_of(world()).join(collectives=True)
    everyone = objects.all_gather_obj(made, world=world())
    # Who took part in the fewest updates of others has joined last.
    return max(range(len(everyone)), key=lambda rank: (-everyone[rank], rank))
