"""What ranks compute on where some of them are parameter servers."""

from __future__ import annotations

import os

from mpitrain.runtime import launcher
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import COLOCATED


def device_of(options: ServerOptions | None, device: str) -> str:
    """Local: what this rank computes on: a server takes no GPU. To be asked before the job is entered."""
    found = launcher.detect(os.environ)
    rank = None if found is None else found.rank
    if options is None or options.servers == COLOCATED or rank is None:
        return device
    return "cpu" if options.servers.isdecimal() and rank < int(options.servers) else device
