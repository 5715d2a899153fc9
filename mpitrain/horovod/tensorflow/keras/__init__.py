"""`import mpitrain.horovod.tensorflow.keras as hvd` in the place of `import horovod.tensorflow.keras as hvd`."""

from mpitrain.horovod.basics import *  # noqa: F403
from mpitrain.horovod.compression import Compression as Compression
from mpitrain.horovod.legacy import broadcast_global_variables as broadcast_global_variables
from mpitrain.horovod.models import load_model as load_model
from mpitrain.horovod.optimizers import KerasDistributedOptimizer
from mpitrain.horovod.optimizers import PartialDistributedOptimizer as PartialDistributedOptimizer
from mpitrain.horovod.process_sets import *  # noqa: F403
from mpitrain.horovod.tensorflow.keras import callbacks as callbacks
from mpitrain.horovod.tensorflow.keras import elastic as elastic
from mpitrain.horovod.values import allgather as allgather
from mpitrain.horovod.values import allreduce as allreduce
from mpitrain.horovod.values import broadcast as broadcast
from mpitrain.horovod.values import reducescatter as reducescatter

DistributedOptimizer = KerasDistributedOptimizer
