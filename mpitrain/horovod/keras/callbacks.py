"""Horovod's Keras callbacks."""

from mpitrain.horovod.tensorflow.keras.callbacks import *  # noqa: F403
from mpitrain.horovod.tensorflow.keras.callbacks import __all__ as __all__
