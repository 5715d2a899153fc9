"""Sets of ranks that act together, under Horovod's names."""

from __future__ import annotations

import numbers
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from mpitrain.collectives.objects import all_found
from mpitrain.errors import CollectiveError
from mpitrain.world import groups
from mpitrain.world.world import World

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

DYNAMIC_VARIABLE = "HOROVOD_DYNAMIC_PROCESS_SETS"
ERROR_INIT, ERROR_UNKNOWN_SET = -1, -3  # what `process_set_included_op` gives


class ProcessSet:
    """Ranks that act together once `init` or `add_process_set` has been given them.

    Args:
        ranks_or_comm: global ranks, or an mpi4py communicator, of which this process is a member.

    Attributes:
        process_set_id: its number; None while it is not registered.
        ranks: the global ranks in it, ascending.
        mpi_comm: the communicator it was made from; of the set of all ranks one for the script's own messages, and
            None without a launcher.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            if not hasattr(ranks_or_comm, "Get_group"):
                raise ValueError(f"a ProcessSet takes ranks or an mpi4py communicator, not {ranks_or_comm!r}")
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, numbers.Integral) for rank in ranks):
            raise ValueError(f"a ProcessSet takes whole numbers for ranks, not {ranks}")
        self.ranks = sorted(map(int, ranks))

    def size(self) -> int | None:
        """Local: how many they are; None while it is not registered."""
        return None if self.process_set_id is None else len(table.ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Local: this process's place among them; None while it is not registered.

        Raises:
            ValueError: this process is not one of them.
        """
        if self.process_set_id is None:
            return None
        member = table.member(self.process_set_id)
        if member is None:
            raise ValueError(f"rank {table.world().rank} is not part of {self}")
        return member.rank

    def included(self) -> bool | None:
        """Local: whether this process is one of them; None while its ranks are not known."""
        return None if self.ranks is None else table.world().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class Table:
    """The registered sets of this process: each with its ranks, and its World where this rank is a member."""

    def __init__(self) -> None:
        self._worlds: dict[int, World | None] = {}
        self._ranks: dict[int, list[int]] = {}
        self._free: deque[int] = deque()
        self._made: dict[tuple[World, tuple[int, ...]], World | None] = {}  # communicators are few: used again

    def start(self, world: World) -> None:
        """Collective: the set of all ranks is number 0."""
        self._worlds, self._ranks = {0: world}, {0: list(range(world.size))}
        self._free.clear()
        global_process_set.ranks = list(range(world.size))
        global_process_set.mpi_comm = groups.communicator_for(world)

    def clear(self) -> None:
        """Local: nothing is registered."""
        self._worlds, self._ranks = {}, {}

    def world(self) -> World:
        """Local: all ranks.

        Raises:
            ValueError: `init` was not called.
        """
        found = self._worlds.get(0)
        if found is None:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return found

    @property
    def started(self) -> bool:
        """Whether `init` was called."""
        return 0 in self._worlds

    def ids_and_ranks(self) -> dict[int, list[int]]:
        """Local: the ranks of each set."""
        return {number: list(ranks) for number, ranks in self._ranks.items()}

    def ranks_of(self, number: int) -> list[int]:
        """Local: the ranks of a set.

        Raises:
            ValueError: there is no such set.
        """
        self.world()
        if number not in self._ranks:
            raise ValueError(f"there is no process set {number}: it was removed, or never registered")
        return self._ranks[number]

    def member(self, number: int) -> World | None:
        """Local: a set as its members see it; None where this rank is none.

        Raises:
            ValueError: there is no such set.
        """
        self.ranks_of(number)
        return self._worlds[number]

    def number_of(self, ranks: Sequence[int]) -> int | None:
        """Local: the number of the set of these ranks, if there is one."""
        return next((number for number, others in self._ranks.items() if others == list(ranks)), None)

    def add(self, ranks: Sequence[int]) -> int:
        """Collective: register a set.

        Raises:
            MismatchError: ranks add different sets.
            ValueError: on every rank: no such ranks.
        """
        world, key = self.world(), (self.world(), tuple(ranks))
        if key not in self._made:
            self._made[key] = groups.group(world, ranks)
        else:
            # Making the group agrees on its ranks; where it is used again, this does.
            world.agreement.call(f"add process set {list(ranks)}")
        number = self._free.popleft() if self._free else max(self._ranks) + 1
        self._worlds[number], self._ranks[number] = self._made[key], list(ranks)
        return number

    def remove(self, number: int) -> None:
        """Collective: the set is no more."""
        self.world().agreement.call(f"remove process set {number} of {self._ranks[number] if number else None}")
        del self._worlds[number], self._ranks[number]
        self._free.append(number)


table = Table()
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def told(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Collective: what ranks call differently is the error that Horovod raises, and so is a wrong argument."""
    try:
        return call(*args, **kwargs)
    except CollectiveError as error:
        raise tf.errors.FailedPreconditionError(None, None, f"{type(error).__name__}: {error}") from error
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error


def member(process_set: ProcessSet) -> World:
    """Local: the ranks of a set, for what they do together.

    Raises:
        ValueError: it is not registered.
        tf.errors.InvalidArgumentError: this rank is not one of them.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered: give it to hvd.init() or hvd.add_process_set() first")
    found = table.member(process_set.process_set_id)
    if found is None:
        rank = table.world().rank
        raise tf.errors.InvalidArgumentError(None, None, f"rank {rank} is not a member of {process_set}")
    return found


def position(process_set: ProcessSet, root_rank: int) -> int:
    """Local: the place in the set of a global rank.

    Raises:
        tf.errors.InvalidArgumentError: it is not in the set.
    """
    ranks = table.ranks_of(process_set.process_set_id or 0)
    if root_rank not in ranks:
        raise tf.errors.InvalidArgumentError(None, None, f"root rank {root_rank} is not one of the ranks {ranks}")
    return ranks.index(root_rank)


def parts_of(everyone: Sequence[Sequence[int]], what: str) -> list[list[int]]:
    """Local: the different lists among those that the ranks gave, each its own, by their first rank.

    Raises:
        ValueError: a rank is in the list of another, but gave one of its own, or is not in the one it gave.
    """
    for rank, ranks in enumerate(everyone):
        places = range(len(everyone))
        odd = [other for other in ranks if other not in places or list(everyone[other]) != list(ranks)]
        if odd or rank not in ranks:
            others = f", which is not what ranks {odd} gave" if odd else ", of which it is no member"
            raise ValueError(f"{what}: rank {rank} gave the ranks {list(ranks)}{others}")
    return sorted(list(ranks) for ranks in {tuple(ranks) for ranks in everyone})


def register(process_sets: Sequence[ProcessSet]) -> None:
    """Collective: the sets given to `init`, once all ranks know that all of them are right.

    Raises:
        ValueError: on every rank: two of them have the same ranks, one has all, or ranks give different ones.
    """
    world = table.world()
    everyone = all_found(lambda: [_given(one, world) for one in process_sets], "register process sets", world=world)
    if len({len(given) for given in everyone}) > 1:
        raise ValueError(f"ranks gave different numbers of process_sets: {[len(given) for given in everyone]}")
    wanted: list[list[list[int]]] = []
    for index, given in enumerate(zip(*everyone, strict=True)):
        what = f"process_sets entry number {index}"
        if any(is_part for is_part, _ in given):
            wanted.append(parts_of([ranks for _, ranks in given], what))
        else:
            if any(ranks != given[0][1] for _, ranks in given):
                raise ValueError(f"{what} must be the same on all ranks, but they gave {[ranks for _, ranks in given]}")
            wanted.append([given[0][1]])
        for ranks in wanted[-1]:
            _check_ranks(ranks, world)
        before = [list(range(world.size)), *(ranks for one in wanted[:-1] for ranks in one)]
        if any(ranks in before for ranks in wanted[-1]):
            raise ValueError(f"{what} is a duplicate: there is another of the ranks {wanted[-1][0]}")
    for process_set, (_, own), lists in zip(process_sets, everyone[world.rank], wanted, strict=True):
        for ranks in lists:
            if table.number_of(ranks) is None:
                told(table.add, ranks)
        process_set.ranks, process_set.process_set_id = own, table.number_of(own)


def _given(process_set: ProcessSet, world: World) -> tuple[bool, list[int]]:
    """Local: whether each rank gives the part that it is in, and the ranks."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_sets must be a list of ProcessSet, not of {type(process_set).__name__}")
    if process_set.mpi_comm is not None:
        return True, groups.ranks_of(world, process_set.mpi_comm)
    return False, list(process_set.ranks or ())


def _check_ranks(ranks: Sequence[int], world: World) -> None:
    """Local: refuse what is no set of ranks."""
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < world.size:
        raise ValueError(f"a process set needs different ranks from 0 to {world.size - 1}, not {list(ranks)}")


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Collective: register a set, or ranks, after `init`. All ranks of the job call it, members or not.

    Raises:
        ValueError: on every rank: there is one of the same ranks, or sets may not be added.
        NotImplementedError: it was made from a communicator.
        tf.errors.FailedPreconditionError: ranks add different sets.
    """

    def look() -> None:
        wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        if wanted.ranks is None:
            raise NotImplementedError("a process set of a communicator is given to hvd.init(), or made from its ranks")
        _check_dynamic("adding")
        _check_ranks(wanted.ranks, table.world())
        if table.number_of(wanted.ranks) is not None:
            raise ValueError(f"there is a process set of the same ranks already: {wanted}")
        found.append(wanted)

    found: list[ProcessSet] = []
    all_found(look, "look at a process set to add", world=table.world())
    found[0].process_set_id = told(table.add, found[0].ranks)
    return found[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Collective: unregister a set; False for one that is not registered, and for that of all ranks.

    Raises:
        ValueError: on every rank: sets may not be removed.
        tf.errors.FailedPreconditionError: ranks remove different sets.
    """

    def look() -> int:
        number = process_set.process_set_id or 0
        if number:
            _check_dynamic("removing")
            process_set.process_set_id = None
        return number if number in table.ids_and_ranks() else 0

    found = all_found(look, "look at a process set to remove", world=table.world())
    if set(found) == {0}:
        return False
    told(table.remove, found[table.world().rank])
    return True


def _check_dynamic(what: str) -> None:
    table.world()
    if os.environ.get(DYNAMIC_VARIABLE, "0") not in ("1", "true", "True"):
        raise ValueError(f'{what} process sets needs {DYNAMIC_VARIABLE}=1 or hvd.init(process_sets="dynamic")')
