"""`mpitrain [options] script.py ...` or `-m module ...`: an unmodified Keras script on all ranks."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.cli.parser import Parser
from mpitrain.config import build, options
from mpitrain.errors import AgreedError
from mpitrain.observe.ranks import places, table
from mpitrain.scripts.options import ScriptOptions
from mpitrain.strategies.parameter_server.choice import device_of
from mpitrain.strategies.parameter_server.connection import connect
from mpitrain.world.consensus import check_equal, run_on_all
from mpitrain.world.start import init
from mpitrain.world.world import World

PYTHON = re.compile(r"python[\d.]*(\.exe)?")

USAGE = "mpitrain [options] script.py [its arguments]\n       mpitrain [options] -m module [its arguments]"


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Local: what stands before the script or `-m`, and the rest, which is empty if there is no script.

    `python` before the script, with `-u` or without, is this Python.
    """
    own, rest = known().divide(arguments)
    if rest and (rest[0] == "-m" or rest[0].endswith(".py")):
        return own, rest
    if rest and PYTHON.fullmatch(Path(rest[0]).name):
        before, script = divide(rest[2 if rest[1:2] == ["-u"] else 1 :])
        if script and not before:
            return own, script
    return list(arguments), []


@functools.cache
def known() -> Parser:
    """Local: the options that may stand before a script."""
    parser = Parser()
    parser.add_options(options(ScriptOptions, "script"))
    return parser


def add_parser(subparsers: Any) -> None:
    """Local: add the options that may stand before a script."""
    parser: Parser = subparsers.add_parser("script", prog="mpitrain", usage=USAGE, description=__doc__)
    parser.add_options(options(ScriptOptions, "script"))


def run(arguments: argparse.Namespace) -> int:
    """Collective: run the script on all ranks.

    Raises:
        AgreedError: on every rank, for what the user can mend.
    """
    given = {name: value for name, value in vars(arguments).items() if name in options(ScriptOptions, "script")}
    chosen = build(ScriptOptions, given)
    servers = chosen.exchange.servers
    # Scripts for Horovod take the GPU of their local rank themselves.
    device = "all" if chosen.as_horovod and chosen.machine.device == "auto" else chosen.machine.device
    world = init(**{**chosen.machine.arguments(), **chosen.faults, "device": device_of(servers, device)})
    check_equal(world.communicator, world.hosts, {"command line": vars(arguments)})
    # After the ranks have met: what is wrong is told once, and not by each of them.
    run_on_all(world.communicator, world.hosts, lambda: chosen.check(frozenset(given)))
    if chosen.exchange.show_plan:
        found = places(world)
        if world.is_root:
            sys.stderr.write(f"{table(found)}\n")
    workers = world if servers is None else connect(world, servers)
    if workers is None:
        return 0  # a parameter server, whose workers are done
    try:
        _run(workers, chosen, arguments.rest)
    except AgreedError as error:
        error.speaks = workers.is_root
        raise
    return 0


def _run(world: World, chosen: ScriptOptions, words: Sequence[str]) -> None:
    """Collective: what those ranks do that compute."""
    from mpitrain.scripts import script
    from mpitrain.scripts.work_division import WorkDivision

    is_module = words[0] == "-m"
    name, *rest = words[is_module:] or [""]
    wanted = script.Script(name, tuple(rest), is_module)
    if chosen.as_horovod:
        script.run_unchanged(world, wanted, functools.partial(_stand_in_for_horovod, world))
        return
    division = WorkDivision(
        chosen.batch_size_is == "global",
        chosen.divide_loops,
        chosen.dry_run,
        chosen.loss_is or ("whole" if chosen.batch_size_is == "global" else "mean"),
        chosen.exchange.sync_batch_norm,
    )
    script.run(world, wanted, Path(chosen.output).resolve(), division)


def _stand_in_for_horovod(world: World) -> None:
    """Local: it loads TensorFlow, which takes seconds."""
    from mpitrain.horovod import alias

    if alias.install() and world.is_root:
        sys.stderr.write("mpitrain: Horovod is not installed; `import horovod` gives mpitrain.horovod\n")
