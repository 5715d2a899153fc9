"""A job that exchanges gradients as training does, and can be made to fail.

Arguments: what happens, on which rank, in which update. Prints when it does, as seconds since the epoch. It starts
fast, without TensorFlow, unless IN_GRAPH is set: then a graph exchanges, by machine code if there is any.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

import mpitrain
from mpitrain.reduction.buckets import TensorSpec, plan_buckets
from mpitrain.reduction.reducer import Reducer

UPDATES, EVALUATE_EVERY = 150, 40
PLAN = plan_buckets([TensorSpec("dense/kernel", (100, 100), "float32"), TensorSpec("dense/bias", (100,), "float32")])


def load_batch(forever: bool) -> None:
    """Where a rank that reads data would be."""
    if forever:
        time.sleep(1000)


def happen(what: str) -> None:
    """The fault."""
    print(f"at {time.time():.3f}", flush=True)
    if what.endswith(" unseen"):  # by the watchdog's thread, at the moment when another took its place
        what = what.removesuffix(" unseen")
        signal.set_wakeup_fd(-1)
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    elif what == "raise":
        raise ValueError("cause")
    elif what == "sys.exit":
        sys.exit(3)
    elif what == "caught exit":
        try:
            sys.exit(3)
        except SystemExit:
            return
    elif what == "_exit":
        os._exit(4)
    load_batch(what == "load")


def exchange_in_graph(reducer: Reducer) -> Callable[[], object]:
    """Collective, when it is called: the same exchange, as a step of TensorFlow makes it."""
    import tensorflow as tf

    from mpitrain.collectives.registry import chosen, engine_of
    from mpitrain.reduction.graph import mean_gradients

    world = mpitrain.init()
    print(f"by {chosen(world)[0]}", flush=True)

    def step() -> list[tf.Tensor]:
        gradients = [tf.ones(spec.shape) for spec in PLAN.specs]
        means: list[tf.Tensor] = mean_gradients(engine_of(world), reducer, PLAN, gradients, 1.0)
        return means

    graph: Callable[[], object] = tf.function(step, autograph=False)
    return graph


def main(what: str, rank: int, update: int) -> None:
    world = mpitrain.init()
    reducer = Reducer(world.communicator, world.agreement, world.all_reduce)
    arrays = [np.ones((100, 100), "f"), np.ones(100, "f")]
    exchange: Callable[[], object] = lambda: reducer.exchange(PLAN, 0, arrays, 1.0)  # noqa: E731
    if "IN_GRAPH" in os.environ:
        exchange = exchange_in_graph(reducer)
    for number in range(UPDATES):
        if number == update and world.rank in (rank, world.rank if what == "all raise" else rank):
            happen("raise" if what == "all raise" else what)
        exchange()
        time.sleep(0.01)
        if number % EVALUATE_EVERY == EVALUATE_EVERY - 1 and world.is_root:
            with world.activity.during("evaluation"):
                time.sleep(0.2)
    world.agreement.call("the end of the program")
    print(f"rank {world.rank} done", flush=True)


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *("nothing", "-1", "20")[len(sys.argv) - 1 :]]
    main(arguments[0], int(arguments[1]), int(arguments[2]))
