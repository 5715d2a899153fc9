"""Parameter servers: an update beside the all-reduce of the same bytes, more servers, and one slow worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpitrain.bench.exchange import split
from mpitrain.bench.interleave import interleave, mean_of_slowest
from mpitrain.bench.report import Row, median, ratio
from mpitrain.bench.server_strategy import NAME, ServerStrategy
from mpitrain.errors import AgreedError
from mpitrain.strategies.parameter_server.connection import client_of, connect
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import Roles
from mpitrain.world.start import use
from mpitrain.world.world import World

TENSORS = 16
CALLS = 2
SLOWER = 5
FLOAT_BYTES = 4
Measure = Callable[[World], dict[str, tuple[float, ...]]]


@dataclass(frozen=True)
class Straggler:
    """How one slow worker is measured."""

    # of a step of a fast worker, which sleeps so long; the slow one sleeps `SLOWER` times that
    compute_seconds: float = 0.05
    seconds: float = 5.0  # how long each mode runs


def measure(
    world: World, mebibytes: Sequence[float], servers: Sequence[int], repeat: int, peer: ServerStrategy | None = None
) -> Iterator[Row]:
    """Collective: one row for each number of bytes and of servers.

    The last ranks are workers, as many as there are beside the most servers, so that all rows have the same ones. In
    each round every number of servers has one turn, in which the update by the servers and the all-reduce of as many
    bytes by the same workers alternate. Each measurement is that of the slowest worker. The peer, which has as many
    servers, has a turn in each round, too.

    Raises:
        AgreedError: there are too few ranks.
    """
    if world.size <= max(servers):
        raise AgreedError(
            f"bench ps with {max(servers)} servers needs {max(servers) + 1} ranks or more: mpirun -np "
            f"{max(servers) + 2} python -m mpitrain bench ps"
        )
    workers = tuple(range(max(servers), world.size))
    for size in mebibytes:
        elements = split(int(size * (1 << 20)) // FLOAT_BYTES, TENSORS)
        found: dict[int, list[Mapping[str, tuple[float, ...]]]] = {count: [] for count in servers}
        for _ in range(repeat):
            for count in servers:
                options = ServerOptions(str(count))
                turn = _on_workers(world, options, workers, partial(_updates, elements=elements))
                if peer is not None:
                    turn["strategy_seconds"] = tuple(world.communicator.broadcast_obj(peer.seconds(elements, CALLS)))
                found[count].append(turn)
        for count in servers:
            raw = {key: tuple(value for one in found[count] for value in one[key]) for key in found[count][0]}
            yield Row({"MiB": f"{size:g}", "workers": len(workers), "servers": count}, raw, _figures(raw))


def measure_straggler(world: World, straggler: Straggler, repeat: int) -> Iterator[Row]:
    """Collective: one row for each way to update, with one worker that is `SLOWER` times slower than the others.

    Rank 0 is the server, the last rank the slow worker. Workers sleep instead of computing, so that they do not take
    each other's cores. The last figure is the gradients that counted, as a share of what the fast workers can make.

    Raises:
        AgreedError: there are too few ranks.
    """
    if world.size < 4:
        raise AgreedError("bench straggler needs four ranks or more: mpirun -np 4 python -m mpitrain bench straggler")
    ways = {
        "sync": ServerOptions(),
        "sync, 1 backup worker": ServerOptions(backup_workers=1),
        "async": ServerOptions(mode="async"),
    }
    workers = tuple(range(1, world.size))
    found: dict[str, list[Mapping[str, tuple[float, ...]]]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, options in ways.items():
            found[way].append(_on_workers(world, options, workers, lambda part: _throughput(part, straggler)))
    fast = (len(workers) - 1) / straggler.compute_seconds
    for way in ways:
        raw = {key: tuple(value for one in found[way] for value in one[key]) for key in found[way][0]}
        rate = median(raw["gradients_per_second"])
        figures: dict[str, float | None] = {
            "updates/s": median(raw["updates_per_second"]),
            "gradients/s": rate,
            "fast workers' gradients/s": fast,
            "share": ratio(rate, fast),
        }
        yield Row({"way": way, "workers": len(workers)}, raw, figures)


def _on_workers(world: World, options: ServerOptions, workers: Sequence[int], work: Measure) -> Any:
    """Collective: what `work` finds on the workers, on all ranks."""
    chosen = Roles(tuple(range(int(options.servers))), tuple(workers))
    member = connect(world, options, chosen)
    found = None
    if member is not None:
        try:
            found = work(member)
        finally:
            # The next turn parts the job anew.
            client_of(member).stop()
            use(world)
    world.agreement.call("end of a turn with parameter servers")
    return next(one for one in world.communicator.all_gather_obj(found) if one is not None)


def _updates(world: World, elements: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """Collective over the workers: seconds of an update by the servers, and of the all-reduce of as many bytes."""
    import keras
    import tensorflow as tf

    from mpitrain.training.optimizer import DistributedOptimizer

    variables = [keras.Variable(np.zeros(size, np.float32), name=f"variable_{i}") for i, size in enumerate(elements)]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1e-3), world=world)
    optimizer.build(variables)
    gradients = [tf.ones([size]) for size in elements]

    @tf.function
    def update() -> None:
        optimizer.apply(gradients, variables)

    buffer = np.ones(sum(elements), np.float32)

    def all_reduce() -> None:
        world.all_reduce.sum(buffer, buffer, 1.0 / world.size)

    if world.size > 1:
        world.all_reduce.setting()
    update()
    update()
    turns: dict[str, Callable[[], list[float]]] = {
        "servers_seconds": lambda: mean_of_slowest(world.communicator, update, CALLS),
        "all_reduce_seconds": lambda: mean_of_slowest(world.communicator, all_reduce, CALLS),
    }
    return interleave(turns, 1)


def _figures(raw: Mapping[str, tuple[float, ...]]) -> dict[str, float | None]:
    servers, ring = median(raw["servers_seconds"]), median(raw["all_reduce_seconds"])
    figures = {"servers ms": servers * 1e3, "all-reduce ms": ring * 1e3, "servers / all-reduce": ratio(servers, ring)}
    if "strategy_seconds" not in raw:
        return figures
    strategy = median(raw["strategy_seconds"])
    return {**figures, f"{NAME} ms": strategy * 1e3, f"{NAME} / servers": ratio(strategy, servers)}


def _throughput(world: World, straggler: Straggler) -> dict[str, tuple[float, ...]]:
    """Collective over the workers: updates and gradients that counted, in a second."""
    import keras
    import tensorflow as tf

    from mpitrain.strategies.parameter_server.worker_optimizer import served_of
    from mpitrain.strategies.strategy import strategy_of
    from mpitrain.training.optimizer import DistributedOptimizer

    variables = [keras.Variable(np.zeros((64, 64), np.float32), name="variable")]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1e-3), world=world)
    gradients = [tf.ones([64, 64])]
    optimizer.apply(gradients, variables)  # the servers begin
    strategy_of(world).join()
    served = served_of(optimizer)
    assert served is not None
    before = served.counts()
    world.communicator.barrier()
    sleep = straggler.compute_seconds * (SLOWER if world.rank == world.size - 1 else 1)
    end = time.perf_counter() + straggler.seconds
    while time.perf_counter() < end:
        time.sleep(sleep)
        optimizer.apply(gradients, variables)
    after = served.counts()
    strategy_of(world).join()
    updates = after["updates"] - before["updates"]
    used = after["samples"] - before["samples"]
    told = world.communicator.broadcast_obj((updates, used))
    return {
        "updates_per_second": (told[0] / straggler.seconds,),
        "gradients_per_second": (told[1] / straggler.seconds,),
    }
