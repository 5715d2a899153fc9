"""What the user can choose about parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.errors import UsageError

MODES = ("sync", "async")
SHARDINGS = ("bytes", "round-robin")
STALE = ("keep", "drop", "scale")
ROWS = ("changed", "pushed")
MAX_SHARD_BYTES = 16 << 20


@dataclass(frozen=True)
class ServerOptions:
    """How parameters are hosted and updated.

    Attributes:
        servers: how many of the first ranks host parameters, or `colocated`.
        mode: `sync`: one update for a gradient of each worker; `async`: one for each gradient, when it comes.
        sharding: variables go to servers balanced by `bytes`, or `round-robin`.
        max_shard_bytes: a larger variable is split along its first axis.
        backup_workers: in `sync`, so many gradients of each step are not waited for (Chen et al. 2016).
        max_staleness: in `async`, by how many steps a worker may be ahead of the slowest (Ho et al. 2013).
        stale: what becomes of gradients of older parameters: `keep`, `drop`, or `scale` (Zhang et al. 2015).
        warmup_steps: in `async`, steps that the first worker trains alone.
        compression: `none`, or `float16` on the way in both directions.
        rows: of a variable whose gradients are rows, what comes back after an update: all that were `changed` since
            the last time, or those that this worker has `pushed`, which then asks for others.
        whole_updates: no part of an update is made before all parts have come: a worker may be lost meanwhile.
    """

    servers: str = "1"
    mode: str = "sync"
    sharding: str = "bytes"
    max_shard_bytes: int = MAX_SHARD_BYTES
    backup_workers: int = 0
    max_staleness: int | None = None
    stale: str = "keep"
    warmup_steps: int = 0
    compression: str = "none"
    rows: str = "changed"
    whole_updates: bool = False

    def check(self, workers: int) -> None:
        """Local: whether these options go together, and with so many workers.

        Raises:
            UsageError: they do not.
        """
        for name, value, choices in (
            ("mode", self.mode, MODES),
            ("sharding", self.sharding, SHARDINGS),
            ("stale", self.stale, STALE),
            ("compression", self.compression, ("none", "float16")),
            ("rows", self.rows, ROWS),
        ):
            if value not in choices:
                raise UsageError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
        least = {"max_shard_bytes": 1, "backup_workers": 0, "max_staleness": 0, "warmup_steps": 0}
        for name, smallest in least.items():
            number = getattr(self, name)
            if number is not None and number < smallest:
                raise UsageError(f"{name} is {number}: it must be at least {smallest}")
        if self.mode == "sync":
            given = {
                "--max-staleness": self.max_staleness is not None,
                "--stale": self.stale != "keep",
                "--warmup-steps": self.warmup_steps > 0,
            }
            wrong = [name for name, is_given in given.items() if is_given]
            if wrong:
                raise UsageError(f"{wrong[0]} is for --mode async: in sync mode no gradient is of older parameters")
            if self.backup_workers >= workers:
                raise UsageError(
                    f"--backup-workers {self.backup_workers} leaves no gradient to wait for, for there are {workers} "
                    "workers: give fewer, or start more"
                )
        elif self.backup_workers:
            raise UsageError("--backup-workers is for --mode sync: in async mode no worker is waited for")
