"""Ranks that sum buffers, of which some kill themselves; the others go on, and check each sum.

    mpirun --with-ft ulfm ... python shrinking_program.py WHAT RANK:STEP ...

Each rank's contribution follows from its number in the job as it was started, so what the sum must be is computed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import mpitrain
from mpitrain.errors import RankLostError
from mpitrain.world import shrink

STEPS = 40
SIZES = {"header": 1, "small": 1000, "large": 100_000, "ring": 1_000_000}
what, *kills = sys.argv[1:]
deaths = {int(rank): int(step) for rank, step in (kill.split(":") for kill in kills)}
world = mpitrain.init(on_failure="shrink")
me = world.rank
source, target = np.full(SIZES[what], me + 1.0), np.empty(SIZES[what])


def exchange(step: int) -> None:
    """Collective: one sum, checked."""
    world.agreement.call(f"step {step}")
    if what != "header":
        world.all_reduce.sum(source, target)
        assert (target == sum(number + 1.0 for number in world.numbers)).all(), (world.numbers, target[0])


def on_ended_step(step: int) -> int:
    """Collective among those that are left: the first step that not all of them have done."""
    left = shrink.shrink(world)
    print(f"rank {me} lost {left.lost} of {left.hosts}", flush=True)
    steps: list[int] = world.communicator.all_gather_obj(step)
    return min(steps)


step = 0
while step < STEPS:
    if deaths.get(me) == step:
        print(f"at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        exchange(step)
        step += 1
    except RankLostError:
        while True:
            try:
                step = on_ended_step(step)
                break
            except RankLostError:
                continue
print(f"rank {me} done as {world.rank} of {world.size}: {world.topology.local_rank} of {world.local_size}", flush=True)
