"""Jobs with parameter servers, of threads or of the ranks that are there, and the truth about what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.comm.communicator import Communicator
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.strategies.parameter_server.connection import connect
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.worker_optimizer import served_of
from mpitrain.strategies.strategy import strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.optimizer import DistributedOptimizer
from mpitrain.world import start
from mpitrain.world.end import finish
from mpitrain.world.world import World, world_of
from tests import simulated
from tests.unit.strategies.parameter_server.mortal import MortalCommunicator

SHAPES: list[tuple[int, ...]] = [(6, 3), (3,), (40, 2), ()]
STEPS = 3


class DeathError(Exception):
    """Raised by `work` on a worker that dies."""


def run(ranks: int, work: Callable[[World], Any], dying: Sequence[int] = (), **options: Any) -> list[Any]:
    """What `work` returns on each worker of a job of threads, once the servers have ended.

    Args:
        ranks: of the job.
        work: what a worker does.
        dying: workers, by their ranks in the job, on which it raises DeathError.
        options: of the servers.
    """
    with _same_world_after():
        found = simulated.run(ranks, lambda communicator: _run(communicator, work, options, dying))
    return [result for result in found if result is not None]


def run_here(communicator: Communicator, work: Callable[[World], Any], **options: Any) -> Any:
    """Collective: what `work` returns on this rank, once the servers have ended; None on servers."""
    with _same_world_after():
        return _run(communicator, work, options)


@contextlib.contextmanager
def _same_world_after() -> Iterator[None]:
    before = list(start._current)
    try:
        yield
    finally:
        start._current[:] = before


def _run(communicator: Any, work: Callable[[World], Any], options: dict[str, Any], dying: Sequence[int] = ()) -> Any:
    if dying:
        left = [rank for rank in range(communicator.size) if rank not in dying]
        communicator = MortalCommunicator.of(communicator, left)
    hosts = ["host"] * communicator.size
    place = topology(communicator.rank, hosts, hosts)
    faults = FaultOptions(on_failure="shrink" if dying else "abort")
    world = world_of(communicator, place, DevicePlan(), ThreadPlan(1, 8), faults=faults)
    member = connect(world, ServerOptions(**options))
    try:
        result = None if member is None else work(member)
    except DeathError:
        communicator.revoke()  # as the first does that notices it
        return None
    finish(world)
    return result


def gradients_of(worker: int, step: int, shapes: list[tuple[int, ...]]) -> list[Any]:
    """The gradients of any worker, in float64."""
    random = np.random.default_rng(1000 * worker + step)
    return [random.normal(size=shape) for shape in shapes]


def samples_of(worker: int, step: int) -> int:
    """Of how many samples they are."""
    return 1 + (worker + step) % 3


def variables() -> list[Any]:
    random = np.random.default_rng(5)
    found = []
    for number, shape in enumerate(SHAPES):
        with keras.name_scope(f"layer_{number}"):
            found.append(keras.Variable(random.normal(size=shape), dtype="float64", name="kernel"))
    return found


def optimizer_of(name: str, **options: Any) -> Any:
    options = {"learning_rate": 0.05, **options}
    made = getattr(keras.optimizers, name)(**options)
    if made.weight_decay:
        made.exclude_from_weight_decay(var_names=["nothing"])
    return made


def expected(name: str, options: dict[str, Any], workers: int) -> tuple[list[Any], list[Any]]:
    """What one process makes of the mean gradients: variables, and the optimizer's own."""
    kept, optimizer = variables(), optimizer_of(name, **options)
    for step in range(STEPS):
        weights = np.array([samples_of(worker, step) for worker in range(workers)], np.float64)
        everyone = [gradients_of(worker, step, SHAPES) for worker in range(workers)]
        means = [np.tensordot(weights / weights.sum(), np.stack(column), 1) for column in zip(*everyone, strict=True)]
        optimizer.apply([tf.constant(mean) for mean in means], kept)
    return [v.numpy() for v in kept], [np.asarray(v.numpy()) for v in optimizer.variables]


def train(world: World, name: str, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    kept = variables()
    if not world.is_root:  # the first worker's values are taken
        kept[0].assign(kept[0] * 1.0)
    optimizer = DistributedOptimizer(optimizer_of(name, **options), world=world)

    def step(number: Any, *gradients: Any) -> None:
        with sample_count(number):
            optimizer.apply(list(gradients), kept)

    for number in range(STEPS):
        own = [tf.constant(gradient) for gradient in gradients_of(world.rank, number, SHAPES)]
        step(tf.constant(float(samples_of(world.rank, number)), tf.float64), *own)
    strategy_of(world).join()
    served = served_of(optimizer)
    assert served is not None
    served.fetch()
    return [v.numpy() for v in kept], [np.asarray(v.numpy()) for v in optimizer.variables]


def check(found: Any, name: str, options: dict[str, Any], workers: int) -> None:
    for mine, reference in zip(found, expected(name, options, workers), strict=True):
        for one, other in zip(mine, reference, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-7, atol=2e-7)
