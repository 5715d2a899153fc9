"""State of an elastic job, where Horovod has it."""

from mpitrain.horovod.elastic import HostUpdateResult, ObjectState, State

__all__ = ["HostUpdateResult", "ObjectState", "State"]
