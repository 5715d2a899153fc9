"""The options of all commands that run on ranks: what each rank uses of its host, and how long it waits."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.config import rules
from mpitrain.world.start import init
from mpitrain.world.world import World

# Those that take a value.
VALUED = (
    *("--device", "--gpu-memory", "--visible-devices", "--intra-threads", "--inter-threads"),
    *("--stall-warning", "--stall-abort"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Local: those of `mpitrain train`, in its words."""
    help_of = {name: rule.help for name, rule in rules().items()}
    parser.add_argument("--device", choices=rules()["device"].choices, default="auto", help=help_of["device"])
    parser.add_argument("--gpu-memory", metavar="SIZE", help=help_of["gpu_memory"])
    parser.add_argument("--share-gpus", action="store_true", help=help_of["share_gpus"])
    parser.add_argument("--visible-devices", metavar="LIST", help=help_of["visible_devices"])
    parser.add_argument("--intra-threads", type=int, metavar="N", help=help_of["intra_threads"])
    parser.add_argument("--inter-threads", type=int, metavar="N", help=help_of["inter_threads"])
    parser.add_argument("--stall-warning", type=float, metavar="SECONDS", help=help_of["stall_warning"])
    parser.add_argument("--stall-abort", type=float, metavar="SECONDS", help=help_of["stall_abort"])
    parser.add_argument("--verbose", action="store_true", help=help_of["verbose"])


def start(arguments: argparse.Namespace, **others: Any) -> World:
    """Collective: `mpitrain.init` with what the command line says.

    Args:
        arguments: with the options of `add_options`.
        others: more for `init`; they win.

    Raises:
        AgreedError: on every rank, for what the user can mend.
    """
    threads = (arguments.intra_threads, arguments.inter_threads)
    options = {
        "device": arguments.device,
        "gpu_memory": arguments.gpu_memory,
        "share_gpus": arguments.share_gpus,
        "visible_devices": arguments.visible_devices,
        "threads": None if threads == (None, None) else threads,
        "verbose": arguments.verbose,
        "stall_warning": arguments.stall_warning,
        "stall_abort": arguments.stall_abort,
    }
    return init(**{**options, **others})
