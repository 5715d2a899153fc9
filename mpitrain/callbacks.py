"""Callbacks for Keras' `fit`: `DataParallel`, `Checkpoint` to go on later, `JitChoice` between XLA and not."""

from mpitrain.checkpoint.callback import Checkpoint
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.jit_choice import JitChoice

__all__ = ["Checkpoint", "CheckpointOptions", "DataParallel", "JitChoice"]
