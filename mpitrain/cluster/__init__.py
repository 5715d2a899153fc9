"""A TensorFlow cluster (jobs, tasks, devices) whose processes are started by MPI."""

from mpitrain.cluster.jobs import Cluster, Task
from mpitrain.cluster.record import find
from mpitrain.cluster.server import Server, cluster_spec, session_config, start_server, tf_config

__all__ = ["Cluster", "Server", "Task", "cluster_spec", "find", "session_config", "start_server", "tf_config"]
