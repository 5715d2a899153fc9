"""The options of commands that run on ranks and have no more: what each rank uses of its host, how long it waits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.config import build, given_of, options, room
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.options import MachineOptions
from mpitrain.world.start import init
from mpitrain.world.world import World


@dataclass(frozen=True)
class RankOptions:
    """Of `serve` and `bench`."""

    machine: MachineOptions = room(MachineOptions)
    faults: Mapping[str, Any] = given_of(FaultOptions)


OPTIONS = options(RankOptions, "serve")


def start(arguments: argparse.Namespace, **others: Any) -> World:
    """Collective: `mpitrain.init` with what the command line says.

    Other arguments are for `init`, too, and win.

    Raises:
        AgreedError: on every rank, for what the user can mend.
    """
    chosen = build(RankOptions, vars(arguments))
    return init(**{**chosen.machine.arguments(), **chosen.faults, **others})
