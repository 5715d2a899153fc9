"""What the user can choose about parameter servers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mpitrain.config import check_needs, check_values, option
from mpitrain.errors import UsageError

SYNCHRONOUS, ASYNCHRONOUS = (("mode", ("sync",)),), (("mode", ("async",)),)


@dataclass(frozen=True)
class ServerOptions:
    """How parameters are hosted and updated.

    Attributes:
        whole_updates: no part of an update is made before all parts have come: a worker may be lost meanwhile.
    """

    servers: str = option(
        "1",
        "so many of the first ranks are parameter servers; colocated: rank 0, which works too",
        name="ps",
        pattern=(r"colocated|[1-9]\d*", "as a number of servers, or colocated"),
        metavar="N",
    )
    mode: str = option(
        "sync", "servers wait for all workers, or apply each gradient when it comes", choices=("sync", "async")
    )
    sharding: str = option(
        "bytes",
        "variables go to servers balanced by bytes, or in turn",
        name="ps_sharding",
        choices=("bytes", "round-robin"),
    )
    max_shard_bytes: int = option(
        16 << 20,
        "larger variables are split between servers, along their first axis",
        name="ps_max_shard_bytes",
        least=1,
    )
    backup_workers: int = option(  # Chen et al. 2016
        0, "sync: so many gradients of each step are not waited for", least=0, needs=SYNCHRONOUS
    )
    max_staleness: int | None = option(  # Ho et al. 2013
        None, "async: by how many steps a worker may be ahead of the slowest", least=0, needs=ASYNCHRONOUS
    )
    stale: str = option(  # Zhang et al. 2015
        "keep", "async: gradients of older parameters", choices=("keep", "drop", "scale"), needs=ASYNCHRONOUS
    )
    warmup_steps: int = option(0, "async: steps that the first worker trains alone", least=0, needs=ASYNCHRONOUS)
    compression: str = option(
        "none", "how gradients and parameters travel", name="ps_compression", choices=("none", "float16")
    )
    rows: str = option(
        "changed",
        "of a variable whose gradients are rows, what comes back after an update: all that were changed since the last "
        "time, or those that this worker has pushed, which then asks for others",
        choices=("changed", "pushed"),
        commands=(),
    )
    whole_updates: bool = False

    def check(self, workers: int) -> None:
        """Local: whether these options go together, and with so many workers.

        Raises:
            UsageError: they do not.
        """
        check_values(self)
        chosen = [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]
        check_needs(self, chosen)
        if self.mode == "sync" and self.backup_workers >= workers:
            raise UsageError(
                f"--backup-workers {self.backup_workers} leaves no gradient to wait for, for there are {workers} "
                "workers: give fewer, or start more"
            )
