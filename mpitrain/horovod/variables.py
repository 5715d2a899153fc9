"""Variables and Python objects of all ranks, and the end of a rank's data, under Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.collectives import operations as collectives
from mpitrain.horovod.basics import check_process_set, global_process_set, world
from mpitrain.training import replicas
from mpitrain.training.exchange import current_exchange


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> None:
    """Collective: variables become those of rank `root_rank`."""
    check_process_set(process_set)
    replicas.broadcast_variables(list(variables), root_rank, world=world())


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Collective: rank `root_rank`'s object, pickled."""
    check_process_set(process_set)
    return collectives.broadcast_obj(obj, root_rank, world=world())


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Callable[[Any], Any]:
    """Local: a function that broadcasts the object it is given."""
    return lambda obj: broadcast_object(obj, root_rank, process_set=process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Collective: every rank's object, in rank order."""
    check_process_set(process_set)
    return collectives.all_gather_obj(obj, world=world())


def join() -> int:
    """Collective: this rank has no more data; take part in the updates of the others until all have joined.

    Returns:
        The last rank that joined; of several at once the highest.
    """
    made = current_exchange(world()).join()
    everyone = collectives.all_gather_obj(made, world=world())
    return max(range(len(everyone)), key=lambda rank: (-everyone[rank], rank))
