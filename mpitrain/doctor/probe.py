"""`python -m mpitrain.doctor.probe` under mpirun, a rank on each host: does MPI get through, and how fast?"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.doctor.trial import BEGUN, MARK, STARTED
from mpitrain.runtime import launcher
from mpitrain.runtime.topology import Topology

LONGEST_SECONDS = 60  # a rank whose launcher is gone ends by itself
PAIRS_SECONDS = 6.0  # for all pairs together
LONGEST_PAIR_SECONDS = 0.6
MESSAGE_BYTES = 1 << 20
MESSAGES_AT_ONCE = 4
ROUND_TRIPS = 30


def measure(communicator: Communicator, hosts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Collective: latency and bandwidth of each rank to the next one, a pair at a time.

    Returns:
        On every rank: for each pair `source`, `target`, `latency_seconds` (half of the shortest round trip of 8
        bytes) and `bits_per_second` (of messages of 1 MiB, one way).
    """
    size, rank = communicator.size, communicator.rank
    pairs = [(first, (first + 1) % size) for first in range(size if size > 2 else 1)]
    seconds = min(LONGEST_PAIR_SECONDS, PAIRS_SECONDS / len(pairs))
    mine = []
    for first, second in pairs:
        communicator.barrier()
        if rank == first:
            latency, rate = _call(communicator, second, seconds)
            ends = {"source": hosts[first], "target": hosts[second]}
            mine.append({**ends, "latency_seconds": latency, "bits_per_second": rate})
        elif rank == second:
            _answer(communicator, first)
    return [pair for pairs_of_rank in communicator.all_gather_obj(mine) for pair in pairs_of_rank]


def _call(communicator: Communicator, other: int, seconds: float) -> tuple[float, float]:
    """Local: half of the shortest round trip, and bits per second; the other rank is in `_answer`."""
    word, message = np.zeros(8, np.uint8), np.zeros(MESSAGE_BYTES, np.uint8)
    trips = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        _swap(communicator, other, word)
        trips.append(time.perf_counter() - start)
    sent, start, spent = 0, time.perf_counter(), 0.0
    while sent == 0 or spent < seconds:
        word[0] = 1  # more messages follow
        _send(communicator, other, word)
        for request in [communicator.isend(message, other) for _ in range(MESSAGES_AT_ONCE)]:
            request.wait()
        _receive(communicator, other, word)
        sent += MESSAGES_AT_ONCE * MESSAGE_BYTES
        spent = time.perf_counter() - start
    word[0] = 0
    _send(communicator, other, word)
    return min(trips) / 2, 8 * sent / spent


def _answer(communicator: Communicator, other: int) -> None:
    """Local: the other side of `_call`."""
    word = np.zeros(8, np.uint8)
    messages = [np.zeros(MESSAGE_BYTES, np.uint8) for _ in range(MESSAGES_AT_ONCE)]
    for _ in range(ROUND_TRIPS):
        _receive(communicator, other, word)
        _send(communicator, other, word)
    while True:
        _receive(communicator, other, word)
        if not word[0]:
            return
        for request in [communicator.irecv(message, other) for message in messages]:
            request.wait()
        _send(communicator, other, word)


def _swap(communicator: Communicator, other: int, word: Any) -> None:
    _send(communicator, other, word)
    _receive(communicator, other, word)


def _send(communicator: Communicator, other: int, word: Any) -> None:
    communicator.isend(word, other).wait()


def _receive(communicator: Communicator, other: int, word: Any) -> None:
    communicator.irecv(word, other).wait()


def _place(communicator: MpiCommunicator) -> Topology:
    """Collective: the topology, held against what the launcher says."""
    topology = communicator.topology()
    launcher.check(launcher.detect(os.environ), topology, communicator.library)
    return topology


def main() -> None:
    """Collective: print one line of JSON on rank 0."""
    # The signal's own action, and no handler: Python's would not run while MPI waits.
    signal.alarm(LONGEST_SECONDS)
    here = f"{os.uname().nodename}:"
    print(here, BEGUN, file=sys.stderr, flush=True)
    communicator = MpiCommunicator(launcher.detect(os.environ))
    try:
        print(here, STARTED, file=sys.stderr, flush=True)
        topology = _place(communicator)
        pairs = measure(communicator, topology.hosts) if topology.size > 1 else []
        told = {
            "library": communicator.library,
            "thread_level": communicator.thread_level,
            "ranks": topology.size,
            "hosts": topology.node_count,
            "pairs": pairs,
        }
    except BaseException as error:
        print(here, repr(error), file=sys.stderr, flush=True)
        communicator.abort(1)
        raise
    if topology.is_root:
        print(MARK + json.dumps(told), flush=True)
    communicator.barrier()


if __name__ == "__main__":
    main()
