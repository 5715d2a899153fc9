"""Collectives on Python objects, and the barrier: they need no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mpitrain.world.start import current_world
from mpitrain.world.world import World

Found = TypeVar("Found")


def barrier(*, world: World | None = None) -> None:
    """Collective: return once every rank has come here. Eager only.

    Args:
        world: the job, or a group of its ranks.

    Example:
        >>> mpitrain.barrier()
    """
    group = world or current_world()
    group.agreement.call("barrier")  # its header is the barrier


def all_gather_obj(obj: Any, *, world: World | None = None) -> list[Any]:
    """Collective: every rank's object (pickled), in rank order.

    Args:
        obj: of this rank.
        world: the job, or a group of its ranks.

    Raises:
        ValueError: on every rank: some rank's object cannot be pickled.

    Example:
        >>> mpitrain.all_gather_obj({"seen": 3})
        [{'seen': 3}]
    """
    group = world or current_world()
    with group.agreement.turn:
        group.agreement.call("all_gather_obj")
        return group.communicator.all_gather_obj(obj)


def broadcast_obj(obj: Any, root: int = 0, *, world: World | None = None) -> Any:
    """Collective: rank `root`'s object (pickled).

    Args:
        obj: of this rank; only that of `root` counts.
        root: the rank.
        world: the job, or a group of its ranks.

    Raises:
        ValueError: on every rank: it cannot be pickled.

    Example:
        >>> mpitrain.broadcast_obj("of rank 0")
        'of rank 0'
    """
    group = world or current_world()
    check_root(root, group)
    with group.agreement.turn:
        group.agreement.call(f"broadcast_obj from rank {root}")
        return group.communicator.broadcast_obj(obj, root)


def all_found(find: Callable[[], Found], what: str, *, world: World) -> list[Found]:
    """Collective: what `find` finds on each rank, in rank order; what it raises on one, all raise.

    With it ranks look at their arguments, at all of them, before a series of collectives begins. `what` is about to be
    done, for messages.

    Raises:
        Exception: where `find` raised it.
        ValueError: on the other ranks, with its text.
    """
    world.agreement.call(what)
    found, error = None, None
    try:
        found = find()
    except Exception as raised:  # they differ; the others are not to wait
        error = raised
    # The text and not the error: what hangs on that need not be fit to travel.
    everyone = world.communicator.all_gather_obj((found, None if error is None else str(error) or repr(error)))
    if error is not None:
        raise error
    texts = [text for _, text in everyone]
    wrong = [rank for rank, text in enumerate(texts) if text is not None]
    if wrong:
        raise ValueError(f"on {world.agreement.name(wrong)}: {texts[wrong[0]]}")
    return [found for found, _ in everyone]


def all_reduce_obj(obj: Any, combine: Callable[[Any, Any], Any], *, world: World | None = None) -> Any:
    """Collective: `combine` applied from rank 0 upwards to every rank's object.

    Args:
        obj: of this rank.
        combine: the same on all ranks: two objects to one.
        world: the job, or a group of its ranks.

    Example:
        >>> mpitrain.all_reduce_obj({1, 2}, set.union)
        {1, 2}
    """
    parts = all_gather_obj(obj, world=world)
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def reduce_scatter_obj(
    objects: Sequence[Any], combine: Callable[[Any, Any], Any], *, world: World | None = None
) -> Any:
    """Collective: the combination of what every rank has at this rank's place of `objects`.

    Args:
        objects: one for each rank.
        combine: as for `all_reduce_obj`.
        world: the job, or a group of its ranks.

    Example:
        >>> mpitrain.reduce_scatter_obj([{1}], set.union)  # one for each rank
        {1}
    """
    mine = all_to_all_obj(objects, world=world)
    total = mine[0]
    for part in mine[1:]:
        total = combine(total, part)
    return total


def all_to_all_obj(objects: Sequence[Any], *, world: World | None = None) -> list[Any]:
    """Collective: send `objects[i]` to rank i; what the ranks sent here, in rank order.

    Args:
        objects: one for each rank.
        world: the job, or a group of its ranks.

    Raises:
        ValueError: on every rank, when some rank did not give one object a rank.

    Example:
        >>> mpitrain.all_to_all_obj(["to rank 0"])  # one for each rank
        ['to rank 0']
    """
    group = world or current_world()
    rows = all_gather_obj(list(objects), world=group)
    wrong = [rank for rank, row in enumerate(rows) if len(row) != group.size]
    if wrong:
        raise ValueError(f"all_to_all_obj needs {group.size} objects, one a rank; ranks {wrong} gave another number")
    return [row[group.rank] for row in rows]


def check_root(root: int, world: World) -> None:
    """Local: refuse what is no rank."""
    if not 0 <= root < world.size:
        raise ValueError(f"root must be a rank from 0 to {world.size - 1}, not {root}")
