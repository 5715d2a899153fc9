"""Servers and workers of a job: who is what, and the life of both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import Any

from mpitrain.comm.communicator import Communicator
from mpitrain.errors import RankLostError, UsageError
from mpitrain.faults.options import SHRINK
from mpitrain.runtime.signals import StopSignals
from mpitrain.strategies.parameter_server.client import Client
from mpitrain.strategies.parameter_server.messages import NEVER_LATE
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import COLOCATED, Roles, roles
from mpitrain.strategies.parameter_server.server_loop import ServerLoop
from mpitrain.strategies.parameter_server.strategy import ParameterServers, ServedOptimizer, servers_of
from mpitrain.world import shrink
from mpitrain.world.consensus import check_equal, run_on_all
from mpitrain.world.groups import group
from mpitrain.world.start import use
from mpitrain.world.world import World

GRACE_SECONDS = 30.0
TERMINATED = 128


def connect(world: World, options: ServerOptions, chosen: Roles | None = None) -> World | None:
    """Collective: part the job into servers and workers.

    Returns:
        On workers the job as they see it, without the servers: from now on the current World of this process. None
        on servers, once all workers have come to the end of their programs.

    Args:
        world: the job.
        options: the same on all ranks.
        chosen: who is what; by default what `options` say. Ranks that are neither get None at once.

    Raises:
        AgreedError: on all ranks: the options do not go with each other, or with so many ranks.
    """
    # Before roles follow from them: ranks with other options would be servers of workers that expect none.
    check_equal(world.communicator, world.hosts, {"the parameter servers": options})
    chosen = chosen or run_on_all(world.communicator, world.hosts, lambda: _chosen(options, world))
    survives = world.faults.on_failure == SHRINK
    options = dataclasses.replace(options, whole_updates=survives)
    there, back = _ways(world, chosen)

    def make_strategy(member: World) -> ParameterServers:
        # What the workers do among themselves the watchdog sees, as if it were the job's.
        member.communicator.activity = world.activity
        client = Client(there, back, chosen, options, member.agreement, world.hosts)
        return ParameterServers(member, client, _serve_optimizer)

    member = group(world, chosen.workers, world.faults, make_strategy)
    if survives:
        shrink.bind(world, member, chosen.servers)
    server = ServerLoop(there, back, chosen, options) if world.rank in chosen.servers else None
    if member is None:
        if server is not None:
            _serve(world, server, chosen)
        return None
    thread = None
    if server is not None:
        thread = threading.Thread(target=server.serve, name="mpitrain server", daemon=True)
        thread.start()
    stop = functools.partial(_stop, client_of(member))
    # The server's thread ends when all workers have said that they stop.
    world.departures.append((stop, lambda: thread.join() if thread is not None else None))
    use(member)
    return member


def _serve_optimizer(optimizer: Any, title: str, strategy: ParameterServers) -> ServedOptimizer:
    from mpitrain.strategies.parameter_server import worker_optimizer  # loads Keras

    return worker_optimizer.WorkerOptimizer(optimizer, title, strategy)


def is_served(world: World) -> bool:
    """Local: whether the parameters of these ranks are hosted by servers."""
    return servers_of(world) is not None


def client_of(world: World) -> Client:
    """Local: the servers of these workers."""
    servers = servers_of(world)
    assert servers is not None
    return servers.client


def _chosen(options: ServerOptions, world: World) -> Roles:
    chosen = roles(options.servers, world.size)
    options.check(len(chosen.workers))
    if world.faults.on_failure == SHRINK:
        if options.mode == "sync" and not options.backup_workers:
            raise UsageError(
                "--mode sync waits for each worker, and does not go on without one: with --on-failure shrink take "
                "--mode async, --backup-workers 1 or more, or leave out --strategy ps, for all-reduce goes on"
            )
        if options.servers == COLOCATED:
            raise UsageError("--ps colocated does not go on without a rank: with --on-failure shrink take --ps 1")
    return chosen


def _ways(world: World, chosen: Roles) -> tuple[Communicator, Communicator]:
    """Collective: what messages travel on; where a rank talks to itself, each direction has its own."""
    if not set(chosen.servers) & set(chosen.workers):
        return world.communicator, world.communicator
    ways: list[Communicator] = []
    for _ in range(2):
        way = world.communicator.split(range(world.size))
        assert way is not None
        way.activity = world.activity
        ways.append(way)
    return ways[0], ways[1]


def _stop(client: Client) -> None:
    """Local: tell the servers that this worker is at its end. If a rank is lost now, they hear it in `on_shrink`."""
    with contextlib.suppress(RankLostError):
        client.stop()


def _serve(world: World, server: ServerLoop, chosen: Roles) -> None:
    """Local: until all workers are done. What signals ask for, the workers answer."""

    def request(number: int) -> None:
        server.signal = number

    def late(number: int) -> None:
        world.communicator.abort(TERMINATED + number)

    signals = StopSignals(GRACE_SECONDS, request, late)
    before, world.activity.position = world.activity.position, NEVER_LATE
    signals.install()
    try:
        while not _is_served_to_the_end(world, server, chosen):
            world.activity.position = NEVER_LATE
    finally:
        signals.remove()
        world.activity.position = max(before, server.position)


def _is_served_to_the_end(world: World, server: ServerLoop, chosen: Roles) -> bool:
    """Local; collective among the ranks that are left when a worker is lost. Whether all workers are done."""
    before = [number for number in world.numbers if number in chosen.workers]
    try:
        server.serve()
    except RankLostError:
        if world.faults.on_failure != SHRINK:
            raise
        where = shrink.shrink(world, shrink.SERVING).where
        now = chosen.among(world.numbers)
        left = [before.index(world.numbers[rank]) for rank in now.workers]
        ended = [worker for worker, rank in enumerate(now.workers) if where[rank] == shrink.AT_END]
        server.on_shrink(now, left, ended)
        return False
    return True
