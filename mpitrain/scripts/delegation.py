"""What is to be done once, and not by every rank: by the first, or by the first of each name or host. No TensorFlow."""

from __future__ import annotations

import contextvars
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mpitrain.world.world import World

_acting: contextvars.ContextVar[bool] = contextvars.ContextVar("acting", default=False)  # others wait for this rank
Told = tuple[Any, Exception | None]  # the result, and the error


def is_delegate() -> bool:
    """Local: whether this rank does what others wait for."""
    return _acting.get()


def delegate(world: World, name: str, action: Callable[[], Any], named: Hashable = (), each_host: bool = False) -> Any:
    """Collective: what `action` returns, or raises, on the first of the ranks that say the same, on all of these.

    Args:
        world: the job.
        name: of the action, the same on all ranks.
        action: what is to be done; what it returns has to be fit to travel.
        named: with what, in the words of this rank. They may differ, as names do that hold the time: each is done.
        each_host: do it, thereafter, also on one rank of each other host, which may find the result on a file system
            that all share.

    Raises:
        Exception: as on the first rank that has one; RuntimeError with its text where that is not fit to travel.
    """
    if is_delegate():
        return action()
    # Else a rank that is at another collective would be paired with the exchanges below.
    world.agreement.call(f"{name} by rank 0")
    said: list[Hashable] = world.communicator.all_gather_obj(named)
    firsts, here = _firsts(said), _firsts(list(zip(said, world.topology.nodes, strict=True)))
    told, error = _attempt(world, name, action) if firsts[world.rank] == world.rank else (None, None)
    everyone: list[Told | None] = world.communicator.all_gather_obj(told)
    if each_host and not _failed(everyone):
        if told is None and here[world.rank] == world.rank:
            told, error = _attempt(world, name, action)
        firsts, everyone = here, world.communicator.all_gather_obj(told)
    if error is not None:
        raise error
    if failed := _failed(everyone):
        raise failed[0]
    first = everyone[firsts[world.rank]]
    assert first is not None
    return first[0]


def _firsts(said: Sequence[Hashable]) -> list[int]:
    """Local: for each rank the first that says the same."""
    return [said.index(one) for one in said]


def _failed(everyone: Sequence[Told | None]) -> list[Exception]:
    return [told[1] for told in everyone if told is not None and told[1] is not None]


def _attempt(world: World, name: str, action: Callable[[], Any]) -> tuple[Told, Exception | None]:
    """Local: what the others are told; the error itself."""
    # What it calls may be patched as well; the others wait for this rank, and would not come to that.
    token = _acting.set(True)
    try:
        with world.activity.during("checkpoint"):
            return (action(), None), None
    except Exception as error:
        return (None, _portable(error) or RuntimeError(f"{name} on rank {world.rank}: {error!r}")), error
    finally:
        _acting.reset(token)


def _portable(error: Exception) -> Exception | None:
    """Local: the error, without what hangs on it, if it is still one of its class when it has travelled."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does there
        return None
    return copy if type(copy) is type(error) and str(copy) == str(error) else None
