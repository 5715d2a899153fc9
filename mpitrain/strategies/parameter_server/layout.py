"""How the update of one optimizer is cut into messages: the same on workers and servers, from the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.reduction.buckets import BucketPlan, TensorSpec, plan_buckets
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.shards import Part, Shard, parts_of, shard_map


@dataclass(frozen=True)
class Layout:
    """Buckets, shards and messages of one update."""

    plan: BucketPlan  # which gradients travel together, and when
    shards: tuple[Shard, ...]  # which server hosts what
    parts: tuple[Part, ...]  # the messages, in their order

    def of_server(self, server: int) -> list[int]:
        """Local: positions of the parts of one server."""
        return [number for number, part in enumerate(self.parts) if part.server == server]

    def of_bucket(self, bucket: int) -> list[int]:
        """Local: positions of the parts of one bucket."""
        return [number for number, part in enumerate(self.parts) if part.bucket == bucket]


def layout(setup: Mapping[str, Any], servers: int, options: ServerOptions) -> Layout:
    """Local: of the update that a worker described, see `setup_of`."""
    specs = specs_of(setup)
    plan = plan_buckets(specs, alone_bytes=setup["alone_bytes"], title=setup["title"])
    shards = shard_map(specs, servers, options.sharding, options.max_shard_bytes, setup["whole"])
    return Layout(plan, shards, parts_of(plan, shards))


def setup_of(title: str, specs: Sequence[TensorSpec], alone_bytes: int, whole: Sequence[int]) -> dict[str, Any]:
    """Local: the part of a setup that decides how the update is cut, as JSON can hold it.

    Args:
        title: whose update it is.
        specs: of the variables.
        alone_bytes: see `plan_buckets`.
        whole: positions of variables that are never split.
    """
    rows = [[spec.name, list(spec.shape), spec.dtype, spec.sparse] for spec in specs]
    return {"title": title, "specs": rows, "alone_bytes": alone_bytes, "whole": list(whole)}


def specs_of(setup: Mapping[str, Any]) -> list[TensorSpec]:
    """Local: what `setup_of` was given."""
    return [TensorSpec(name, tuple(shape), dtype, sparse) for name, shape, dtype, sparse in setup["specs"]]
