"""`mpitrain bench`: measures, and prints a Markdown table; raw numbers go to a JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mpitrain.bench import eager, exchange, memory, ordering, peers, recovery, servers, start, step
from mpitrain.bench.processes import Mpirun
from mpitrain.bench.report import Report, Row, job, machine
from mpitrain.bench.server_strategy import ServerStrategy
from mpitrain.bench.workload import MODELS
from mpitrain.cli import rank_options
from mpitrain.cli.parser import Parser
from mpitrain.cluster.options import NetworkOptions
from mpitrain.config import build, options
from mpitrain.errors import AgreedError, UsageError
from mpitrain.world.world import World

Subparsers = Any  # argparse._SubParsersAction, which is private


def add_parser(subparsers: Subparsers) -> None:
    """Local: add `bench` and its benchmarks to the command line."""
    parser = subparsers.add_parser("bench", help="measure speed, memory and start", description=__doc__)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="where every single measurement is written")
    common.add_argument("--repeat", type=_positive(int), default=9, metavar="R", help="rounds (default 9)")
    models = argparse.ArgumentParser(add_help=False)
    models.add_argument("--models", type=_list(_model), default=list(MODELS), metavar="A,B", help="of all models")
    models.add_argument("--batch-size", type=_positive(int), default=16, metavar="N", help="per rank (default 16)")
    blocks = argparse.ArgumentParser(add_help=False)
    blocks.add_argument(
        "--block-seconds", type=_positive(float), default=step.BLOCK_SECONDS, metavar="S", help="length of a turn"
    )
    blocks.add_argument("--busy-python", action="store_true", help="beside a thread that runs Python all the time")
    here = Parser(add_help=False)
    here.add_options(rank_options.OPTIONS)
    network = Parser(add_help=False)
    network.add_options(options(NetworkOptions))
    link = argparse.ArgumentParser(add_help=False)
    link.add_argument("--rate", type=_positive(float), metavar="BITS_PER_SECOND", help="of the link, for the limit")
    ranks = argparse.ArgumentParser(add_help=False)
    ranks.add_argument("--ranks", type=_positive(int), default=2, metavar="N", help="of the jobs (default 2)")
    jobs = argparse.ArgumentParser(add_help=False, parents=[ranks])
    jobs.add_argument("--mpirun", metavar="COMMAND", help="mpirun with its options, if it needs any")

    own = names.add_parser(
        "exchange", parents=[common, here, link], help="the exchange against MPI_Allreduce (under mpirun)"
    )
    own.add_argument("--mebibytes", type=_list(_positive(float)), default=list(exchange.MEBIBYTES), metavar="A,B")
    own.add_argument("--tensors", type=_list(_positive(int)), default=list(exchange.TENSORS), metavar="A,B")
    own = names.add_parser("eager", parents=[common, here], help="small tensors outside of graphs (under mpirun)")
    own.add_argument("--bytes", type=_list(_positive(int)), default=list(eager.BYTES), metavar="A,B")
    own = names.add_parser(
        "ps", parents=[common, here, network], help="parameter servers against all-reduce (under mpirun)"
    )
    own.add_argument("--mebibytes", type=_list(_positive(float)), default=[1.0, 16.0, 100.0], metavar="A,B")
    own.add_argument("--servers", type=_list(_positive(int)), default=[1], metavar="A,B", help="(default 1)")
    own.add_argument("--peer", action="store_true", help="TensorFlow's ParameterServerStrategy, too")
    own = names.add_parser(
        "straggler", parents=[common, here], help="parameter servers with a slow worker (under mpirun)"
    )
    own.add_argument("--compute-seconds", type=_positive(float), default=0.05, metavar="S", help="of a fast worker")
    own.add_argument("--seconds", type=_positive(float), default=5.0, metavar="S", help="of each turn")
    own = names.add_parser(
        "ordering", parents=[common, here, link, network], help="fetching tensors at once or in turn (under mpirun)"
    )
    own.add_argument("--mebibytes", type=_positive(float), default=ordering.MEBIBYTES, metavar="M", help="of each")
    own.add_argument("--tensors", type=_positive(int), default=ordering.TENSORS, metavar="N", help="of a step")
    own.add_argument("--windows", type=_list(_positive(int)), default=list(ordering.WINDOWS), metavar="A,B")
    own.add_argument("--work-seconds", type=_positive(float), metavar="S", help="with each; default: as it travels")
    names.add_parser("step", parents=[common, here, models, blocks], help="the training step (under mpirun)")
    names.add_parser(
        "peers", parents=[common, here, models, blocks], help="the step beside other libraries (under mpirun)"
    )
    names.add_parser("memory", parents=[common, models, jobs], help="peak memory (starts its own mpirun)")
    names.add_parser("start", parents=[common, jobs], help="import and start (starts its own mpirun)")
    own = names.add_parser(
        "recovery", parents=[common, models, ranks], help="from a lost rank to the next step (by itself)"
    )
    own.add_argument("--run-args", default="", metavar="'...'", help="options for mpitrain run, as one word")


def run(arguments: argparse.Namespace) -> int:
    """Collective under mpirun: measure, print on rank 0, write the JSON file.

    Raises:
        AgreedError: on all ranks: the benchmark needs more of them, or the file cannot be written.
        UsageError: the same outside mpirun.
    """
    asked = {key: value for key, value in vars(arguments).items() if isinstance(value, str | int | float | list)}
    setting = machine(asked)
    if arguments.benchmark == "recovery":
        _writable(arguments.json)
        words = shlex.split(arguments.run_args)
        measured = recovery.measure(arguments.models, arguments.ranks, arguments.batch_size, arguments.repeat, words)
        _write(arguments.json, Report(arguments.benchmark, setting, _print(measured)))
        return 0
    if arguments.benchmark in ("memory", "start"):
        mpirun = Mpirun.find(arguments.mpirun)
        _writable(arguments.json)
        rows = _print(_in_own_jobs(mpirun, arguments))
        _write(arguments.json, Report(arguments.benchmark, {**setting, "mpirun": list(mpirun.command)}, rows))
        return 0
    world = rank_options.start(arguments)
    refusal = _refusal(arguments.json) if world.is_root else None
    refusal = world.communicator.broadcast_obj(refusal)
    if refusal:
        raise AgreedError(refusal)
    measured = _in_this_job(world, arguments)
    # It is measured while it is iterated over, so all ranks do that.
    rows = _print(measured) if world.is_root else tuple(measured)
    setting |= job(world)
    if world.is_root:
        _write(arguments.json, Report(arguments.benchmark, setting, rows))
    return 0


def _strategy(world: World, arguments: argparse.Namespace) -> ServerStrategy | None:
    """Collective: the peer of `bench ps`, if it is asked for."""
    if not arguments.peer:
        return None
    if len(arguments.servers) > 1 or world.size <= arguments.servers[0]:
        raise AgreedError("bench ps --peer is for one number of servers, and needs a rank more: leave out --peer")
    return ServerStrategy(world, arguments.servers[0], **_network(arguments))


def _network(arguments: argparse.Namespace) -> dict[str, Any]:
    """Local: who may connect to the servers, as what starts them takes it."""
    return dataclasses.asdict(build(NetworkOptions, vars(arguments)))


def _in_this_job(world: World, arguments: argparse.Namespace) -> Iterator[Row]:
    name = arguments.benchmark
    if world.size < 2 and name not in ("ps", "straggler"):  # which say for themselves how many they need
        raise AgreedError(f"bench {name} needs two ranks or more: mpirun -np 2 python -m mpitrain bench {name}")
    if name == "exchange":
        sizes = (arguments.mebibytes, arguments.tensors)
        return exchange.measure(world, *sizes, repeat=arguments.repeat, rate=arguments.rate)
    if name == "eager":
        return eager.measure(world, arguments.bytes, arguments.repeat)
    if name == "ps":
        return servers.measure(
            world, arguments.mebibytes, arguments.servers, arguments.repeat, _strategy(world, arguments)
        )
    if name == "straggler":
        how = servers.Straggler(arguments.compute_seconds, arguments.seconds)
        return servers.measure_straggler(world, how, arguments.repeat)
    if name == "ordering":
        load = ordering.Load.of(arguments.mebibytes, arguments.tensors, arguments.work_seconds, arguments.rate)
        return ordering.measure(world, load, arguments.windows, arguments.repeat, **_network(arguments))
    timing = step.Timing(arguments.repeat, arguments.block_seconds, arguments.busy_python)
    others = peers.start(world, peers.available()) if name == "peers" else {}
    return step.measure(world, arguments.models, arguments.batch_size, timing, others)


def _in_own_jobs(mpirun: Mpirun, arguments: argparse.Namespace) -> Iterator[Row]:
    if arguments.benchmark == "start":
        return start.measure(mpirun, arguments.ranks, arguments.repeat)
    return memory.measure(mpirun, arguments.models, arguments.ranks, arguments.batch_size, arguments.repeat)


def _print(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Print each row of a Markdown table as soon as it is measured."""
    printed: list[Row] = []
    for row in rows:
        cells = {**row.case, **row.figures}
        if not printed:
            print(_line(cells, cells))
            print(_line(cells, ["---:"] * len(cells)), flush=True)
        print(_line(cells, [_cell(value) for value in cells.values()]), flush=True)
        printed.append(row)
    return tuple(printed)


def _line(titles: Iterable[str], cells: Iterable[str]) -> str:
    padded = [f"{cell:>{max(len(title), 8)}}" for title, cell in zip(titles, cells, strict=True)]
    return f"| {' | '.join(padded)} |"


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _refusal(path: Path | None) -> str | None:
    """Why the file cannot be written, found out before anything is measured."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            return None
    except OSError as error:
        return f"--json {path} cannot be written ({error.strerror}): give another file"


def _writable(path: Path | None) -> None:
    refusal = _refusal(path)
    if refusal:
        raise UsageError(refusal)


def _write(path: Path | None, report: Report) -> None:
    if path is not None:
        path.write_text(json.dumps(report.as_json(), indent=1, default=str) + "\n")


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is no positive {word}")
        return value

    return read


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(item) for item in text.split(",")]


def _model(name: str) -> str:
    if name not in MODELS:
        raise argparse.ArgumentTypeError(f"there is no model {name!r}: name some of {', '.join(MODELS)}")
    return name
