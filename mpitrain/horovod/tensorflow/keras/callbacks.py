"""Horovod's Keras callbacks."""

from mpitrain.horovod.callbacks import *  # noqa: F403
