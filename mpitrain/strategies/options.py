"""What is exchanged, and when, as the user can choose it."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.config import option, room
from mpitrain.strategies.parameter_server.options import ServerOptions


@dataclass(frozen=True)
class StrategyOptions:
    """How the ranks of a job come to the same parameters."""

    strategy: str = option(
        "all-reduce", "all ranks average gradients, or parameter servers take them", choices=("all-reduce", "ps")
    )
    server_options: ServerOptions = room(ServerOptions, needs=(("strategy", ("ps",)),))
    sync_batch_norm: bool = option(
        False, "batch normalization uses the moments of all ranks' samples", needs=(("strategy", ("all-reduce",)),)
    )
    show_plan: bool = option(False, "print where each rank is, and what it has", incidental=True)

    @property
    def servers(self) -> ServerOptions | None:
        """Of the parameter servers; None where gradients are averaged by all ranks."""
        return self.server_options if self.strategy == "ps" else None
