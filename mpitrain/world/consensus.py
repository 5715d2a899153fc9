"""What only some ranks find wrong, all ranks hear of: they leave together, and rank 0 says why, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mpitrain.comm.communicator import Communicator
from mpitrain.errors import AgreedError, UsageError

Result = TypeVar("Result")


def run_on_all(communicator: Communicator, hosts: Sequence[str], action: Callable[[], Result]) -> Result:
    """Collective: run `action` on every rank; when it raises UsageError on one, all ranks raise.

    The action raises UsageError for what the user can mend. It may be collective itself, as long as no rank raises
    between two collectives of it.

    Returns:
        What `action` returned on this rank.

    Raises:
        AgreedError: the same on all ranks: the first error, with its ranks where others do not have it.
    """
    error: UsageError | None = None
    result: list[Result] = []
    try:
        result.append(action())
    except AgreedError:
        raise  # from within a collective of `action`: the others have it too
    except UsageError as raised:
        error = raised
    # As text: the classes of errors may have constructors that pickle does not know how to call.
    texts = communicator.all_gather_obj(None if error is None else str(error))
    first = next((text for text in texts if text is not None), None)
    if first is not None:
        ranks = [rank for rank, text in enumerate(texts) if text == first]
        places = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
        word = "rank" if len(ranks) == 1 else "ranks"
        raise AgreedError(first if len(ranks) == len(texts) else f"on {word} {places} only: {first}") from error
    return result[0]


def run_on_root(communicator: Communicator, action: Callable[[], object]) -> None:
    """Collective: run `action` on rank 0; when it raises UsageError there, all ranks raise.

    Raises:
        AgreedError: the same on all ranks.
    """
    text: str | None = None
    if communicator.rank == 0:
        try:
            action()
        except UsageError as raised:
            text = str(raised)
    text = communicator.broadcast_obj(text)
    if text is not None:
        raise AgreedError(text)


def check_equal(communicator: Communicator, hosts: Sequence[str], values: Mapping[str, object]) -> None:
    """Collective: check that values are the same on all ranks.

    Values are compared by their `repr`.

    Raises:
        AgreedError: the same on all ranks, about the first value that differs.
    """
    everyone = communicator.all_gather_obj({name: repr(value) for name, value in values.items()})
    for name in values:
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != everyone[0].get(name):
                raise AgreedError(
                    f"{name} must be the same on all ranks, but is {everyone[0].get(name)} on rank 0 ({hosts[0]}) and "
                    f"{theirs.get(name)} on rank {rank} ({hosts[rank]}): give all hosts the same files and arguments"
                )
