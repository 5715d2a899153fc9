"""What interrupts an elastic job."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """Something failed that an elastic job recovers from: all ranks go back to what they committed last."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's)
    """The hosts of an elastic job have changed: all ranks go on from where they are.

    Args:
        skip_sync: nobody is new, so nothing needs to be broadcast.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
