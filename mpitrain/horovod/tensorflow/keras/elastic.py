"""`horovod.tensorflow.keras.elastic`."""

from mpitrain.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpitrain.horovod.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
