"""A job without TensorFlow whose ranks exchange gradients as training does, and in which some end.

Arguments: in which way, who (`all` or a rank), in which phase. Prints when it does, as seconds since the epoch.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time

way, who, phase = sys.argv[1:4]
UPDATES = 60
WAYS = {
    "raise": "raise SystemExit(3)",
    "exit": "exit(3)",
    "text": "sys.exit('a text')",
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "os._exit 3": "os._exit(3)",
    "thread": "threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(30)",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "sys.excepthook = lambda *found: print('shown by a hook'); raise ValueError('of this rank')",
    "abort": "os.abort()",
    "kill": "os.kill(os.getpid(), 9)",
    "C": "ctypes.CDLL(None).exit(0)",
}
WORKERS = ("fork", "spawn", "forkserver")


def happen(rank: int) -> None:
    """The end."""
    if who in ("all", str(rank)):
        print(f"at {time.time():.3f}", flush=True)
        exec(WAYS[way], {"ctypes": ctypes, "os": os, "sys": sys, "threading": threading, "time": time})


def forked() -> None:
    """Local: children that are ended as soon as they are forked, as those of a pool are."""
    context = multiprocessing.get_context("fork")
    for _ in range(60):
        children = [context.Process(target=time.sleep, args=(30,)) for _ in range(2)]
        for child in children:
            child.start()
            child.terminate()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [-15, -15], [child.exitcode for child in children]


def main() -> None:
    """The ranks."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    if phase == "before":
        happen(int(rank))
    if phase == "late" and rank == who:
        time.sleep(4)
    import mpitrain

    world = mpitrain.init()
    if phase == "forked":
        forked()
    if phase == "workers":
        for method in WORKERS:
            multiprocessing.get_context(method).Process(target=time.sleep, args=(1000,)).start()  # type: ignore[attr-defined]
        subprocess.Popen(["sleep", "1000"])
        world.communicator.barrier()
    if phase in ("init", "workers"):
        happen(world.rank)
    if phase == "atexit":
        atexit.register(happen, world.rank)
    import numpy as np

    from mpitrain.reduction.buckets import TensorSpec, plan_buckets
    from mpitrain.reduction.reducer import Reducer

    plan = plan_buckets([TensorSpec("kernel", (100,), "float32")])
    reducer = Reducer(world.communicator, world.agreement, world.all_reduce)
    for number in range(UPDATES):
        if number == UPDATES // 2 and phase == "loop":
            happen(world.rank)
        reducer.exchange(plan, 0, [np.ones(100, "f")], 1.0)
        time.sleep(0.01)
    print("END", world.rank, flush=True)
    if phase == "end":
        happen(world.rank)


if __name__ == "__main__":
    main()
