"""`mpitrain serve`: the ranks become the tasks of a TensorFlow cluster, which serves clients until it is stopped.

TensorFlow's servers ask for no name and no password: whoever reaches one can run programs as you. So they are for
this host alone, unless you name the network that your hosts are on (--bind).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from mpitrain.cli import rank_options
from mpitrain.cli.parser import Parser
from mpitrain.cluster.jobs import sizes, task_of
from mpitrain.cluster.options import NetworkOptions
from mpitrain.cluster.record import DEFAULT_NAME, Record
from mpitrain.cluster.server import Server, start_server
from mpitrain.cluster.shutdown import ClientProcess, Signals, check_client, serve_until_stopped
from mpitrain.config import build, options
from mpitrain.errors import DeviceError, LauncherError, UsageError
from mpitrain.runtime import devices, gpus, launcher
from mpitrain.runtime.columns import columns
from mpitrain.runtime.counted import counted
from mpitrain.runtime.topology import Topology
from mpitrain.world.consensus import check_equal, run_on_all, run_on_root
from mpitrain.world.world import World

USAGE = """mpirun -np N python -m mpitrain serve [options]
       mpirun -np N python -m mpitrain serve [options] client.py [its arguments]
       mpirun -np N python -m mpitrain serve [options] -m client [its arguments]
       mpitrain serve --stop [--name NAME]"""
EPILOG = (
    "A client that is named here runs on rank 0's host, and the cluster ends with it, with its exit code. Other "
    "clients find the servers with mpitrain.cluster.find(), or by the targets that are printed."
)
STOP_SECONDS = 40.0


def add_parser(subparsers: Any) -> None:
    """Local: add `serve` to the command line."""
    told = {"usage": USAGE, "description": __doc__, "epilog": EPILOG}
    _add(subparsers.add_parser("serve", prog="mpitrain serve", **told))


def _add(parser: Parser) -> Parser:
    parser.add_argument(
        "--jobs", default="worker", metavar="A=N,B=M", help="tasks of each job; one without number gets all other ranks"
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="of the cluster, where several run")
    parser.add_argument("--stop", action="store_true", help="stop the cluster, from any terminal")
    parser.add_options(options(NetworkOptions))
    parser.add_argument("--port", type=int, metavar="P", help="of the first task of each host; others follow")
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="CPU devices of each task (default 1)")
    parser.add_argument("--cpu-jobs", default="ps", metavar="A,B", help="jobs that see no GPU (default ps)")
    parser.add_options(rank_options.OPTIONS)
    return parser


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Local: the options of `serve`, and the client with its arguments."""
    return _add(Parser()).divide(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Collective: serve until somebody says stop. Local with `--stop`.

    Returns:
        0, or the exit code of the client that came to its end.

    Raises:
        AgreedError: on every rank, for what the user can mend.
        UsageError: the cluster that is to be stopped does not run.
    """
    if arguments.stop:
        return _stop(arguments)
    written: list[Record] = []
    # Called after all ranks have left, because registered before `init` registers that.
    atexit.register(_remove, written)
    world = _start(arguments)
    # A rank with other jobs or networks would arrange another cluster.
    check_equal(world.communicator, world.hosts, {"command line": vars(arguments)})
    record = run_on_all(world.communicator, world.hosts, lambda: Record.named(arguments.name, os.environ))
    run_on_root(world.communicator, lambda: check_client(arguments.rest))
    run_on_root(world.communicator, record.check)
    signals = Signals(world)  # on all ranks before anybody hears of the cluster
    server = start_server(
        arguments.jobs,
        **dataclasses.asdict(build(NetworkOptions, vars(arguments))),
        port=arguments.port,
        cpu_devices=arguments.cpu_devices,
        world=world,
    )
    run_on_root(world.communicator, lambda: record.write(server.cluster))
    client = None
    if world.is_root:
        written.append(record)
        print(_told(world, server, arguments), flush=True)
        client = ClientProcess.start(arguments.rest, record, os.environ) if arguments.rest else None
    return serve_until_stopped(world, record, client, signals)


def _remove(written: Sequence[Record]) -> None:
    for record in written:
        record.remove()


def _start(arguments: argparse.Namespace) -> World:
    """Collective: with no GPU for the jobs that need none, so that others may have them."""
    started_by = launcher.detect(os.environ)
    rank, size = (started_by.rank or 0, started_by.size or 1) if started_by else (0, 1)
    try:
        job = task_of(sizes(arguments.jobs, size), rank).job
    except (UsageError, ValueError):
        job = ""  # told once the ranks have met
    if job not in arguments.cpu_jobs.split(","):
        return rank_options.start(arguments)
    with contextlib.suppress(DeviceError):  # told once the ranks have met
        seen = devices.visible(os.environ, gpus.detect())
        gpus.select(devices.assign(seen, Topology.single(os.uname().nodename), "cpu"))
    return rank_options.start(arguments, device="auto", visible_devices=None)


def _told(world: World, server: Server, arguments: argparse.Namespace) -> str:
    """The tasks, and how to stop them."""
    named = "" if arguments.name == DEFAULT_NAME else f" --name {arguments.name}"
    rows = [
        (task.device, str(rank), world.hosts[rank], f"grpc://{address}")
        for rank, (task, address) in enumerate(server.cluster.tasks().items())
    ]
    end = f"ends with {arguments.rest[0]}" if arguments.rest else "stop it with Ctrl-C"
    return (
        f"mpitrain: a cluster of {counted(len(rows), 'task')} runs, {server.access}; {end}, or with "
        f"`mpitrain serve --stop{named}`\n{columns(('task', 'rank', 'host', 'target'), rows)}"
    )


def _stop(arguments: argparse.Namespace) -> int:
    """Local: stop a cluster that was started elsewhere."""
    started_by = launcher.detect(os.environ)
    if started_by is not None and (started_by.size or 1) > 1:
        raise LauncherError(f"serve --stop asks a cluster that runs: run it alone, without {started_by.name}")
    if Record.named(arguments.name, os.environ).stop(STOP_SECONDS):
        return 0
    sys.stderr.write(
        f"mpitrain: the cluster named {arguments.name} has not answered: it had ended without a word, or has lost a "
        "host. Look for processes with `ps -ef | grep 'mpitrain serve'`\n"
    )
    return 1
