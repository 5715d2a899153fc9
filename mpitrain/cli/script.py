"""`mpitrain [options] script.py ...` or `-m module ...`: an unmodified Keras script on all ranks."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.cli import machine
from mpitrain.config import TrainConfig, check_needs, rules
from mpitrain.errors import AgreedError, UsageError
from mpitrain.faults.options import NON_FINITE
from mpitrain.observe.ranks import places, table
from mpitrain.strategies.parameter_server.choice import device_of, options_of
from mpitrain.strategies.parameter_server.connection import connect
from mpitrain.world.consensus import same, together
from mpitrain.world.world import World

# Options of this command that take a value; the others are switches.
STRATEGY = (
    *("strategy", "ps", "mode", "ps_sharding", "ps_max_shard_bytes", "backup_workers", "max_staleness", "stale"),
    *("warmup_steps", "ps_compression"),
)
VALUED = (
    *("--batch-size-is", "--loss-is", "--output", "--non-finite", *machine.VALUED),
    *("--" + name.replace("_", "-") for name in STRATEGY),
)
PYTHON = re.compile(r"python[\d.]*(\.exe)?")

OWN_DIVISION = (
    "batch_size_is",
    "divide_loops",
    "dry_run",
    "loss_is",
    "output",
    "sync_batch_norm",
)  # for scripts that do not divide their work


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Local: what stands before the script or `-m`, and the rest, which is empty if there is no script.

    `python` before the script, with `-u` or without, is this Python.
    """
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "-m" or argument.endswith(".py"):
            return list(arguments[:index]), list(arguments[index:])
        if PYTHON.fullmatch(Path(argument).name):
            own, rest = divide(arguments[index + 2 if arguments[index + 1 : index + 2] == ["-u"] else index + 1 :])
            return (list(arguments[:index]), rest) if rest and not own else (list(arguments), [])
        if not argument.startswith("--"):
            break
        index += 2 if argument in VALUED else 1
    return list(arguments), []


def add_parser(subparsers: Any) -> None:
    """Local: add the options that may stand before a script."""
    usage = "mpitrain [options] script.py [its arguments]\n       mpitrain [options] -m module [its arguments]"
    parser = subparsers.add_parser("script", prog="mpitrain", usage=usage, description=__doc__)
    unset = argparse.SUPPRESS  # what was not given is filled in by `run`
    parser.add_argument("--batch-size-is", choices=("rank", "global"), default=unset, help="of whom (default rank)")
    parser.add_argument(
        "--loss-is",
        choices=("mean", "sum", "whole"),
        help="a loss of the script's own: mean or sum over rows, or of a whole batch "
        "(default mean, whole under --batch-size-is global)",
    )
    parser.add_argument("--sync-batch-norm", action="store_true", help=rules()["sync_batch_norm"].help)
    parser.add_argument("--output", default=unset, metavar="DIR", help="for rank-N.log")
    parser.add_argument("--dry-run", action="store_true", help="stop at the first training, print what would change")
    parser.add_argument(
        "--divide-loops", action="store_true", help="divide the tf.data batches of the script's own loops, too"
    )
    parser.add_argument(
        "--as-horovod", action="store_true", help="a script that imports horovod: it finds mpitrain.horovod instead"
    )
    machine.add_options(parser)
    parser.add_argument("--non-finite", choices=NON_FINITE, help=f"{rules()['non_finite'].help} (default warn)")
    for name in STRATEGY:
        rule = rules()[name]
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=rule.kind,
            choices=rule.choices or None,
            default=unset,
            metavar=None if rule.choices else rule.metavar or "N",
            help=rule.help,
        )
    parser.add_argument("--show-plan", action="store_true", help="print where each rank is, and what it has")


def run(arguments: argparse.Namespace) -> int:
    """Collective: run the script on all ranks.

    Args:
        arguments: with `rest`, the list that begins with the script or `-m`.

    Raises:
        AgreedError: on every rank, for what the user can mend.
    """
    given = fill(arguments)
    # Scripts for Horovod take the GPU of their local rank themselves.
    device = "all" if arguments.as_horovod and arguments.device == "auto" else arguments.device
    device = device_of(arguments, device)
    world = machine.start(arguments, device=device, non_finite=arguments.non_finite)
    same(world.communicator, world.hosts, {"command line": vars(arguments)})
    together(world.communicator, world.hosts, lambda: check_given(arguments, given))
    if arguments.show_plan:
        found = places(world)
        if world.is_root:
            sys.stderr.write(f"{table(found)}\n")
    options = options_of(arguments)
    workers = world if options is None else connect(world, options)
    if workers is None:
        return 0  # a parameter server, whose workers are done
    try:
        _run(workers, arguments)
    except AgreedError as error:
        error.speaks = workers.is_root
        raise
    return 0


def fill(arguments: argparse.Namespace) -> set[str]:
    """Local: give options that were not given their defaults.

    Returns:
        The names of those that were given.
    """
    given = {name for name, value in vars(arguments).items() if value is not None and value is not False}
    defaults = TrainConfig()
    filled = {"batch_size_is": "rank", **{name: getattr(defaults, name) for name in ("output", *STRATEGY)}}
    vars(arguments).update({name: value for name, value in filled.items() if name not in given})
    return given


def check_given(arguments: argparse.Namespace, given: set[str]) -> None:
    """Local: whether every option that was given can act.

    Raises:
        UsageError: one would do nothing.
    """
    check_needs(given, lambda name: getattr(arguments, name))
    if arguments.strategy == "ps" and arguments.loss_is not in (None, "mean"):
        raise UsageError("--loss-is: parameter servers average gradients, weighted by rows: leave it out, or them")
    if not arguments.as_horovod:
        return
    if arguments.strategy == "ps":
        raise UsageError("--as-horovod averages gradients by all-reduce: leave out --strategy ps")
    unused = next((name for name in OWN_DIVISION if name in given), None)
    if unused is not None:
        raise UsageError(
            f"--{unused.replace('_', '-')} does nothing with --as-horovod, for such a script divides its work itself: "
            "leave it out"
        )


def _run(world: World, arguments: argparse.Namespace) -> None:
    """Collective: what those ranks do that compute."""
    from mpitrain.scripts import script
    from mpitrain.scripts.divided import Division

    is_module = arguments.rest[0] == "-m"
    name, *rest = arguments.rest[is_module:] or [""]
    wanted = script.Script(name, tuple(rest), is_module)
    if arguments.as_horovod:
        from mpitrain.horovod import alias

        if alias.install() and world.is_root:
            sys.stderr.write("mpitrain: Horovod is not installed; `import horovod` gives mpitrain.horovod\n")
        script.run_alike(world, wanted)
        return
    division = Division(
        arguments.batch_size_is == "global",
        arguments.divide_loops,
        arguments.dry_run,
        arguments.loss_is or ("whole" if arguments.batch_size_is == "global" else "mean"),
        arguments.sync_batch_norm,
    )
    script.run(world, wanted, Path(arguments.output).resolve(), division)
