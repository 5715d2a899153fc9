"""`import mpitrain.horovod.tensorflow as hvd` in the place of `import horovod.tensorflow as hvd`."""

from mpitrain.horovod.basics import *  # noqa: F403
from mpitrain.horovod.compression import Compression as Compression
from mpitrain.horovod.legacy import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
from mpitrain.horovod.legacy import broadcast_global_variables as broadcast_global_variables
from mpitrain.horovod.normalization import SyncBatchNormalization as SyncBatchNormalization
from mpitrain.horovod.operations import *  # noqa: F403
from mpitrain.horovod.optimizers import DistributedOptimizer as DistributedOptimizer
from mpitrain.horovod.process_sets import *  # noqa: F403
from mpitrain.horovod.tapes import DistributedGradientTape as DistributedGradientTape
from mpitrain.horovod.tapes import PartialDistributedGradientTape as PartialDistributedGradientTape
from mpitrain.horovod.tensorflow import elastic as elastic
from mpitrain.horovod.tensorflow import mpi_ops as mpi_ops
from mpitrain.horovod.tensorflow import util as util
from mpitrain.horovod.tensorflow.mpi_ops import check_num_rank_power_of_2 as check_num_rank_power_of_2
from mpitrain.horovod.tensorflow.mpi_ops import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from mpitrain.horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from mpitrain.horovod.variables import *  # noqa: F403
