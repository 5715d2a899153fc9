"""The options of commands that are given a job before it starts: how many ranks, and where."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.config import MOST, option
from mpitrain.errors import UsageError
from mpitrain.runtime.hostfile import Host, parse, read


@dataclass(frozen=True)
class JobOptions:
    """Of `run` and `doctor`."""

    num_proc: int | None = option(
        None, "ranks; default: one for each slot", least=1, below=MOST, metavar="N", aliases=("-np", "-n")
    )
    hosts: str | None = option(None, "hosts, each with its slots", metavar="A:4,B:4", aliases=("-H", "--host"))
    hostfile: str | None = option(None, "the same as a file, in any dialect", metavar="FILE", aliases=("-hostfile",))

    def named_hosts(self) -> tuple[Host, ...]:
        """Local: the hosts that are named; () where none are.

        Raises:
            UsageError: they are named in two ways, or cannot be read.
        """
        if self.hosts is not None and self.hostfile is not None:
            raise UsageError("hosts are given with -H and with --hostfile: give one of them")
        if self.hosts is not None:
            return parse(self.hosts, "-H")
        return read(self.hostfile) if self.hostfile is not None else ()
