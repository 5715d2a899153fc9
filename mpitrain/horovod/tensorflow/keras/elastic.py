"""`horovod.tensorflow.keras.elastic`."""

from mpitrain.horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from mpitrain.horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from mpitrain.horovod.elastic import CommitStateCallback as CommitStateCallback
from mpitrain.horovod.elastic import KerasState as KerasState
from mpitrain.horovod.elastic import UpdateBatchStateCallback as UpdateBatchStateCallback
from mpitrain.horovod.elastic import UpdateEpochStateCallback as UpdateEpochStateCallback
from mpitrain.horovod.elastic import run as run
