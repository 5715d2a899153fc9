"""mpitrain: collective data-parallel training of TensorFlow and Keras 3 models over MPI.

Importing this package loads neither MPI nor TensorFlow; each name loads what it needs when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpitrain import errors

__version__ = "0.1.0"

_HOME = {
    "World": "mpitrain.world.world",
    "init": "mpitrain.world.start",
    "DistributedOptimizer": "mpitrain.training.optimizer",
    "DistributedGradientTape": "mpitrain.training.tape",
    "ParameterServer": "mpitrain.strategies.parameter_server.servers",
    "pull_rows": "mpitrain.strategies.parameter_server.servers",
    "sample_count": "mpitrain.strategies.weighting",
    "broadcast_variables": "mpitrain.training.functional",
    "verify_replicas": "mpitrain.training.functional",
    "callbacks": "mpitrain.callbacks",
    "Trainer": "mpitrain.trainer.trainer",
    "shard": "mpitrain.training.functional",
    "cluster": "mpitrain.cluster",
    "placement": "mpitrain.placement",
    "all_reduce": "mpitrain.collectives.operations",
    "all_gather": "mpitrain.collectives.operations",
    "broadcast": "mpitrain.collectives.operations",
    "reduce_scatter": "mpitrain.collectives.operations",
    "all_to_all": "mpitrain.collectives.operations",
    "barrier": "mpitrain.collectives.objects",
    "all_gather_obj": "mpitrain.collectives.objects",
    "broadcast_obj": "mpitrain.collectives.objects",
    "all_reduce_obj": "mpitrain.collectives.objects",
    "reduce_scatter_obj": "mpitrain.collectives.objects",
    "all_to_all_obj": "mpitrain.collectives.objects",
}

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ParameterServer",
    "Trainer",
    "World",
    "__version__",
    "all_gather",
    "all_gather_obj",
    "all_reduce",
    "all_reduce_obj",
    "all_to_all",
    "all_to_all_obj",
    "barrier",
    "broadcast",
    "broadcast_obj",
    "broadcast_variables",
    "callbacks",
    "cluster",
    "errors",
    "init",
    "placement",
    "pull_rows",
    "reduce_scatter",
    "reduce_scatter_obj",
    "sample_count",
    "shard",
    "verify_replicas",
]

if TYPE_CHECKING:
    from mpitrain import callbacks, cluster, placement
    from mpitrain.collectives.objects import (
        all_gather_obj,
        all_reduce_obj,
        all_to_all_obj,
        barrier,
        broadcast_obj,
        reduce_scatter_obj,
    )
    from mpitrain.collectives.operations import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
    from mpitrain.strategies.parameter_server.servers import ParameterServer, pull_rows
    from mpitrain.strategies.weighting import sample_count
    from mpitrain.trainer.trainer import Trainer
    from mpitrain.training.functional import broadcast_variables, shard, verify_replicas
    from mpitrain.training.optimizer import DistributedOptimizer
    from mpitrain.training.tape import DistributedGradientTape
    from mpitrain.world.start import init
    from mpitrain.world.world import World


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if _HOME[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
