"""Parameter servers as the command line asks for them."""

from __future__ import annotations

import os
from typing import Any

from mpitrain.runtime import launcher
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import COLOCATED


def options_of(arguments: Any) -> ServerOptions | None:
    """Local: the options among those of a command; None where gradients are averaged by all ranks.

    Args:
        arguments: with `strategy`, `ps` and so on as attributes, see `TrainConfig`.
    """
    if arguments.strategy != "ps":
        return None
    return ServerOptions(
        arguments.ps,
        arguments.mode,
        arguments.ps_sharding,
        arguments.ps_max_shard_bytes,
        arguments.backup_workers,
        arguments.max_staleness,
        arguments.stale,
        arguments.warmup_steps,
        arguments.ps_compression,
    )


def device_of(arguments: Any, device: str) -> str:
    """Local: what this rank computes on: a server takes no GPU. To be asked before the job is entered.

    Args:
        arguments: as for `options_of`.
        device: of the workers.
    """
    found = launcher.detect(os.environ)
    rank = None if found is None else found.rank
    if arguments.strategy != "ps" or arguments.ps == COLOCATED or rank is None:
        return device
    return "cpu" if arguments.ps.isdecimal() and rank < int(arguments.ps) else device
