"""Callbacks for Keras' `fit`: `DataParallel` makes it data-parallel, `Checkpoint` lets it go on later."""

from mpitrain.checkpoint.callback import Checkpoint
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.training.callbacks import DataParallel

__all__ = ["Checkpoint", "CheckpointOptions", "DataParallel"]
