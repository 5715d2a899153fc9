"""`horovod.tensorflow.elastic`."""

from mpitrain.horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from mpitrain.horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from mpitrain.horovod.elastic import ObjectState as ObjectState
from mpitrain.horovod.elastic import State as State
from mpitrain.horovod.elastic import TensorFlowKerasState as TensorFlowKerasState
from mpitrain.horovod.elastic import TensorFlowState as TensorFlowState
from mpitrain.horovod.elastic import run as run
