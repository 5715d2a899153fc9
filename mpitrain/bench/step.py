"""A whole training step: on one rank alone, on all without exchange, on all with it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mpitrain.bench.busy import busy_python
from mpitrain.bench.interleave import block, interleave, on_root
from mpitrain.bench.report import Row, median, ratio
from mpitrain.bench.workload import Workload, optimizer, train_step, workload
from mpitrain.world.world import World

BLOCK_SECONDS = 1.0
FEWEST_STEPS, MOST_STEPS = 2, 200

Step = Callable[[], float]
Peer = Callable[[str, int], Step]


@dataclass(frozen=True)
class Timing:
    """How long is measured."""

    repeat: int  # rounds; in each, every mode has one block of steps
    block_seconds: float = BLOCK_SECONDS  # about how long a block is
    busy_python: bool = False  # beside a thread that runs Python all the time


def measure(
    world: World, models: Sequence[str], batch_size: int, timing: Timing, peers: Mapping[str, Peer] | None = None
) -> Iterator[Row]:
    """Collective: one row for each model.

    Blocks of steps take turns: `alone` (rank 0 computes, the others sleep), `together` (all compute, no exchange),
    `exchanged` (all, with DistributedOptimizer), `python` (the same without machine code, where there is any), and then
    each of the peers. The figures are medians of rank 0's steps. Each of the peers makes, from model name and batch
    size, a step that exchanges gradients.
    """
    world.all_reduce.setting()  # measured now, if ever, and not in the first step
    for name in models:
        yield _case(world, name, batch_size, timing, peers or {})


def _case(world: World, name: str, batch_size: int, timing: Timing, peers: Mapping[str, Peer]) -> Row:
    from mpitrain.strategies.strategy import strategy_of

    load = workload(name, batch_size, seed=world.rank)
    compute, exchanged = _steps(load, world)
    others = {peer: make(name, batch_size) for peer, make in {**_without_machine_code(world), **peers}.items()}
    for step in (compute, exchanged, *others.values()):
        step()  # traces
    steps = _steps_of_block(world, compute, timing.block_seconds)
    statistics = strategy_of(world).statistics
    spent: dict[str, list[float]] = {"exchange_seconds": [], "waiting_seconds": []}

    def on_all(step: Step) -> list[float]:
        world.communicator.barrier()
        return block(step, steps)

    def with_statistics() -> list[float]:
        updates, exchange, waiting = statistics.updates, statistics.exchange, statistics.waiting
        seconds = on_all(exchanged)
        done = statistics.updates - updates
        spent["exchange_seconds"].append((statistics.exchange - exchange) / done)
        spent["waiting_seconds"].append((statistics.waiting - waiting) / done)
        return seconds

    turns: dict[str, Callable[[], list[float]]] = {
        "alone_seconds": lambda: on_root(world.communicator, lambda: block(compute, steps)),
        "together_seconds": lambda: on_all(compute),
        "exchanged_seconds": with_statistics,
    }
    for peer, step in others.items():
        turns[f"{peer}_seconds"] = partial(on_all, step)
    with busy_python() if timing.busy_python else contextlib.nullcontext():
        raw = interleave(turns, timing.repeat)
    raw |= {key: tuple(values) for key, values in spent.items()}
    case: dict[str, str | int] = {"model": name, "parameters": load.model.count_params(), "batch": batch_size}
    return Row(case, raw, _figures(raw, list(others)))


def _steps(load: Workload, world: World) -> tuple[Step, Step]:
    """Local: the step without exchange and the step with it, on the same weights."""
    from mpitrain.training.optimizer import DistributedOptimizer

    return train_step(load, optimizer()), train_step(load, DistributedOptimizer(optimizer(), world=world))


def _without_machine_code(world: World) -> dict[str, Peer]:
    """Local: the step as Python exchanges it, where machine code does otherwise."""
    from mpitrain.collectives.registry import chosen
    from mpitrain.strategies.all_reduce import AllReduce
    from mpitrain.training.optimizer import DistributedOptimizer

    strategy = world.strategy
    if chosen(world)[0] != "native" or not isinstance(strategy, AllReduce):
        return {}

    def make(name: str, batch_size: int) -> Step:
        step = train_step(workload(name, batch_size, seed=world.rank), DistributedOptimizer(optimizer(), world=world))
        # What is traced now is exchanged by Python whenever it runs; what is traced later is not.
        strategy.engine = "host"
        step()  # traces
        strategy.engine = None
        return step

    return {"python": make}


def _steps_of_block(world: World, step: Step, block_seconds: float) -> int:
    """Collective: the same number of steps on all ranks."""
    start = time.perf_counter()
    step()
    wanted = math.ceil(block_seconds / (time.perf_counter() - start))
    return int(world.communicator.broadcast_obj(max(FEWEST_STEPS, min(MOST_STEPS, wanted))))


def _figures(raw: Mapping[str, tuple[float, ...]], peers: Sequence[str]) -> dict[str, float | None]:
    medians = {key: median(values) for key, values in raw.items()}
    alone, together, exchanged = (medians[f"{mode}_seconds"] for mode in ("alone", "together", "exchanged"))
    figures: dict[str, float | None] = {
        "alone ms": alone * 1e3,
        "together ms": together * 1e3,
        "exchanged ms": exchanged * 1e3,
        "overhead ms": (exchanged - alone) * 1e3,
        "efficiency": ratio(alone, exchanged),
        "exchange ms": medians["exchange_seconds"] * 1e3,
        "waiting ms": medians["waiting_seconds"] * 1e3,
        "exposed ms": (exchanged - together) * 1e3,
    }
    for peer in peers:
        theirs = medians[f"{peer}_seconds"]
        figures |= {
            f"{peer} ms": theirs * 1e3,
            f"{peer} overhead ms": (theirs - alone) * 1e3,
            f"{peer} / exchanged": ratio(theirs, exchanged),
        }
    return figures
