"""`import mpitrain.horovod.keras as hvd` in the place of `import horovod.keras as hvd`."""

from mpitrain.horovod.tensorflow.keras import *  # noqa: F403
