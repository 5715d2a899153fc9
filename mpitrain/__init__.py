"""mpitrain: collective data-parallel training of TensorFlow and Keras 3 models over MPI.

Importing this package loads neither MPI nor TensorFlow; each name loads what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpitrain import errors as errors

__version__ = "0.1.0"

if TYPE_CHECKING:  # the same once more, for type checkers; `tests/unit/test_reference.py` compares them
    from mpitrain import callbacks as callbacks
    from mpitrain import cluster as cluster
    from mpitrain import placement as placement
    from mpitrain.collectives.objects import all_gather_obj as all_gather_obj
    from mpitrain.collectives.objects import all_reduce_obj as all_reduce_obj
    from mpitrain.collectives.objects import all_to_all_obj as all_to_all_obj
    from mpitrain.collectives.objects import barrier as barrier
    from mpitrain.collectives.objects import broadcast_obj as broadcast_obj
    from mpitrain.collectives.objects import reduce_scatter_obj as reduce_scatter_obj
    from mpitrain.collectives.operations import all_gather as all_gather
    from mpitrain.collectives.operations import all_reduce as all_reduce
    from mpitrain.collectives.operations import all_to_all as all_to_all
    from mpitrain.collectives.operations import broadcast as broadcast
    from mpitrain.collectives.operations import reduce_scatter as reduce_scatter
    from mpitrain.strategies.parameter_server.programs import ParameterServer as ParameterServer
    from mpitrain.strategies.parameter_server.programs import pull_rows as pull_rows
    from mpitrain.strategies.weighting import sample_count as sample_count
    from mpitrain.trainer.data import load_data as load_data
    from mpitrain.trainer.trainer import Trainer as Trainer
    from mpitrain.training.functional import broadcast_variables as broadcast_variables
    from mpitrain.training.functional import shard as shard
    from mpitrain.training.functional import verify_replicas as verify_replicas
    from mpitrain.training.optimizer import DistributedOptimizer as DistributedOptimizer
    from mpitrain.training.tape import DistributedGradientTape as DistributedGradientTape
    from mpitrain.world.start import init as init
    from mpitrain.world.world import World as World

_HOME = {
    name: f"mpitrain.{module}"
    for module, names in {
        "collectives.objects": "all_gather_obj all_reduce_obj all_to_all_obj barrier broadcast_obj reduce_scatter_obj",
        "collectives.operations": "all_gather all_reduce all_to_all broadcast reduce_scatter",
        "strategies.parameter_server.programs": "ParameterServer pull_rows",
        "strategies.weighting": "sample_count",
        "trainer.data": "load_data",
        "trainer.trainer": "Trainer",
        "training.functional": "broadcast_variables shard verify_replicas",
        "training.optimizer": "DistributedOptimizer",
        "training.tape": "DistributedGradientTape",
        "world.start": "init",
        "world.world": "World",
    }.items()
    for name in names.split()
}
_MODULES = ("callbacks", "cluster", "errors", "placement")

__all__ = ["__version__", *_HOME, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mpitrain.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
