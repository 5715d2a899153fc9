"""`horovod.keras.elastic` is `horovod.tensorflow.keras.elastic` by another name."""

from mpitrain.horovod.tensorflow.keras.elastic import *  # noqa: F403
