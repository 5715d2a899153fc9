"""Turns: what is compared runs in alternation, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from mpitrain.comm.communicator import Communicator

NAP_SECONDS = 0.02


def interleave(turns: Mapping[str, Callable[[], list[float]]], repeat: int) -> dict[str, tuple[float, ...]]:
    """Local, or collective where the turns are: call each of `turns` `repeat` times, in alternation.

    Each round begins with another one, so that none always follows the same neighbour.

    Returns:
        All measurements of each.
    """
    names = list(turns)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeat):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            found[name] += turns[name]()
    return {name: tuple(values) for name, values in found.items()}


def block(step: Callable[[], object], steps: int) -> list[float]:
    """Local, or collective where `step` is: seconds of each of `steps` calls, after one that is not timed."""
    step()  # brings caches and thread pools back after another's turn
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def mean_of_slowest(communicator: Communicator, call: Callable[[], object], calls: int) -> list[float]:
    """Collective: seconds of one call, the mean of `calls` in a row, on the slowest rank."""
    communicator.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    slowest = np.array([(time.perf_counter() - start) / calls])
    communicator.all_reduce(slowest, "max")
    return [float(slowest[0])]


def on_root(communicator: Communicator, measure: Callable[[], list[float]]) -> list[float]:
    """Collective: rank 0 measures while the others sleep, leaving processor and memory to it.

    MPI waits by polling, so here the others only look for a message from time to time.
    """
    token = np.zeros(1)
    if communicator.rank != 0:
        request = communicator.irecv(token, 0)
        while not request.test():
            time.sleep(NAP_SECONDS)
        return []
    time.sleep(NAP_SECONDS)  # the others may still be busy with what came before
    seconds = measure()
    for rank in range(1, communicator.size):
        communicator.isend(token, rank).wait()
    return seconds
