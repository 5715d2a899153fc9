"""Collectives as Horovod's Keras modules have them, in traced steps too: numbers or tensors in, tensors out."""

from __future__ import annotations

from typing import Any

from mpitrain.horovod import operations
from mpitrain.horovod.basics import Average
from mpitrain.horovod.compression import Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Collective: reduce a number or array."""
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return operations.allreduce(value, average, op=op, compression=compression, name=name, **factors)


def allgather(value: Any, name: str | None = None) -> Any:
    """Collective: concatenate arrays along the first axis."""
    return operations.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Collective: rank `root_rank`'s value."""
    return operations.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Collective: reduce an array, and keep this rank's rows."""
    return operations.reducescatter(value, op=op, name=name)
