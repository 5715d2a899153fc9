"""Jobs of Horovod's whose ranks are threads: each of them has a table of process sets, as each process has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpitrain.horovod import process_sets
from mpitrain.world.world import World
from tests.unit import job

Result = TypeVar("Result")


class TableOfThread(threading.local, process_sets.Table):
    """What a process has of process sets, for each thread. What TensorFlow's own threads run sees nothing of it."""


def run(size: int, body: Callable[[World], Result], hosts: Sequence[str] = ()) -> list[Result]:
    """What `body` returns on each rank, where `hvd.init()` was called; see `tests.unit.job.run`."""

    def rank(world: World) -> Result:
        process_sets.table.start(world)
        return body(world)

    return job.run(size, rank, hosts)
