"""Horovod's operations and the job, where tests and libraries import them."""

from mpitrain.horovod.basics import *  # noqa: F403
from mpitrain.horovod.basics import operation
from mpitrain.horovod.common.basics import HorovodBasics as HorovodBasics
from mpitrain.horovod.common.util import num_rank_is_power_2
from mpitrain.horovod.operations import *  # noqa: F403
from mpitrain.horovod.process_sets import *  # noqa: F403
from mpitrain.horovod.variables import join as join

_basics = HorovodBasics()
check_num_rank_power_of_2 = num_rank_is_power_2
handle_average_backwards_compatibility = operation
