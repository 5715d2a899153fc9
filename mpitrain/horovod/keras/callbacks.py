"""Horovod's Keras callbacks."""

from mpitrain.horovod.tensorflow.keras.callbacks import *  # noqa: F403
