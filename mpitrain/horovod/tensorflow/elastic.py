"""`horovod.tensorflow.elastic`."""

from mpitrain.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpitrain.horovod.elastic import ObjectState, State, TensorFlowKerasState, TensorFlowState, run

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]
