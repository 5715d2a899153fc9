"""The exchange alone: gradients through a graph against MPI_Allreduce and the limit of the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.bench.interleave import interleave, mean_of_slowest
from mpitrain.bench.report import Row, median, ratio
from mpitrain.world.world import World

MEBIBYTES = (1.0, 16.0, 64.0, 256.0)
TENSORS = (1, 20, 200)
CALLS_BYTES = 32 << 20
MOST_CALLS = 32


def measure(
    world: World, mebibytes: Sequence[float], tensors: Sequence[int], repeat: int, rate: float | None = None
) -> Iterator[Row]:
    """Collective: one row for each number of bytes in each number of tensors.

    These take turns: a `tf.function` that makes fresh gradients, the same with their exchange, the same without machine
    code where there is any, and MPI_Allreduce in place of as many bytes outside TensorFlow. The exchange is the second
    less the first. Each measurement is that of the slowest rank. `rate` is in bits per second, of each host's link.
    """
    world.all_reduce.setting()  # measured now, if ever, and not in the first step
    for size in mebibytes:
        for count in tensors:
            yield _case(world, size, count, repeat, rate)


def limit_seconds(ranks: int, nbytes: int, rate: float) -> float:
    """Local: the least time of an all-reduce over links of `rate` bits per second, one rank a host.

    Each rank has to send and receive 2 (N - 1) / N of the bytes (Patarasuk and Yuan, 2009).
    """
    return 2 * (ranks - 1) / ranks * nbytes * 8 / rate


def split(elements: int, count: int) -> list[int]:
    """Local: sizes of `count` pieces, none empty, that differ by at most one element."""
    return [max(1, elements // count + (index < elements % count)) for index in range(count)]


def _case(world: World, size: float, count: int, repeat: int, rate: float | None) -> Row:
    from mpitrain.collectives.registry import chosen

    elements = split(int(size * (1 << 20)) // 4, count)
    nbytes = 4 * sum(elements)
    reducer = _reducer(world)
    engine = chosen(world)[0]
    produce, exchange = _functions(world, reducer, elements, engine)
    by_python = {}
    if engine == "native":
        _, by_python["python_seconds"] = _functions(world, _reducer(world), elements, "host")
    buffer = np.zeros(nbytes // 4, np.float32)
    calls = max(1, min(MOST_CALLS, CALLS_BYTES // nbytes))
    host: list[float] = []

    def exchanged() -> list[float]:
        before, updates = reducer.statistics.exchange, reducer.statistics.updates
        seconds = mean_of_slowest(world.communicator, exchange, calls)
        host.append((reducer.statistics.exchange - before) / (reducer.statistics.updates - updates))
        return seconds

    def in_place() -> None:
        world.communicator.all_reduce(buffer)

    # The first call traces, connections and buffers are made by it, and Python makes the first updates.
    for warm in (produce, exchange, in_place, *by_python.values()) * 6:
        warm()
    raw = interleave(
        {
            "produced_seconds": lambda: mean_of_slowest(world.communicator, produce, calls),
            "exchanged_seconds": exchanged,
            **{name: partial(mean_of_slowest, world.communicator, call, calls) for name, call in by_python.items()},
            "mpi_seconds": lambda: mean_of_slowest(world.communicator, in_place, calls),
        },
        repeat,
    )
    raw["host_seconds"] = tuple(host)
    limit = None if rate is None else limit_seconds(world.size, nbytes, rate)
    return Row({"MiB": f"{size:g}", "tensors": count}, raw, _figures(raw, limit))


def _figures(raw: dict[str, tuple[float, ...]], limit: float | None) -> dict[str, float | None]:
    produced, whole = median(raw["produced_seconds"]), median(raw["exchanged_seconds"])
    mpi, host, exchange = median(raw["mpi_seconds"]), median(raw["host_seconds"]), whole - produced
    figures = {
        "produced ms": produced * 1e3,
        "with exchange ms": whole * 1e3,
        "exchange ms": exchange * 1e3,
        "host calls ms": host * 1e3,
        "MPI_Allreduce ms": mpi * 1e3,
        "exchange / MPI": ratio(exchange, mpi),
        "host calls / MPI": ratio(host, mpi),
    }
    if "python_seconds" in raw:
        figures["exchange by Python ms"] = (median(raw["python_seconds"]) - produced) * 1e3
    if limit is not None:
        figures |= {
            "limit ms": limit * 1e3,
            "exchange / limit": ratio(exchange, limit),
            "MPI / limit": ratio(mpi, limit),
        }
    return figures


def _reducer(world: World) -> Any:
    from mpitrain.reduction.reducer import Reducer

    return Reducer(world.communicator, world.agreement, world.all_reduce)


def _functions(
    world: World, reducer: Any, elements: Sequence[int], engine_name: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Local: a step that only makes gradients, and the same step with their exchange."""
    import tensorflow as tf

    from mpitrain.collectives.registry import engine_of
    from mpitrain.reduction.graph import mean_gradients, plan_of

    engine, hosts = engine_of(world, engine_name), world.topology.node_count
    variables = [tf.Variable(tf.ones([size]), name=f"variable_{index}") for index, size in enumerate(elements)]

    def gradients() -> list[Any]:
        return [variable * 1.0001 for variable in variables]

    def used(tensors: Sequence[Any]) -> Any:
        # A result nobody uses would be pruned from the graph.
        return tf.add_n([tensor[0] for tensor in tensors])

    @tf.function
    def produce() -> Any:
        return used(gradients())

    @tf.function
    def exchange() -> Any:
        own = gradients()
        return used(mean_gradients(engine, reducer, plan_of(own, variables, "benchmark", hosts), own, 1.0))

    return lambda: float(produce()), lambda: float(exchange())
