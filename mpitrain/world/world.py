"""Which ranks are one job, and what this process has of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from mpitrain.comm.all_reduce import AllReduce, layout_of
from mpitrain.comm.communicator import Communicator
from mpitrain.faults.activity import Activity
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.watchdog import Watchdog
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import Topology
from mpitrain.world.agreement import Agreement
from mpitrain.world.policy import MakePolicy, Policy, by_size


@dataclass(eq=False)
class World:
    """All ranks of the job, and what this one may use.

    Attributes:
        topology: where each rank is.
        communicator: all ranks, on MPI traffic of our own.
        agreement: checks that ranks call the same collectives.
        all_reduce: how flat host buffers are summed.
        devices: the accelerator of this rank.
        threads: TensorFlow's thread pools on this rank.
        faults: how faults are dealt with.
        watchdog: talks to the other ranks beside MPI; None with one rank.
        numbers: of the ranks, in the job as it was started; others than 0, 1, 2, ... once some were lost.
        verbose: rank 0, and one rank of each other host, tell which ways are taken.
        strategy: what these ranks exchange, and when; see `strategies.strategy.strategy_of`. `make_strategy` makes it.
        shrink_group: those with which they lose ranks together.
        departures: of the groups this rank is in, a function that begins to leave and one that waits for all to leave.
    """

    topology: Topology
    communicator: Communicator
    agreement: Agreement
    all_reduce: AllReduce
    devices: DevicePlan
    threads: ThreadPlan
    faults: FaultOptions = field(default_factory=FaultOptions)
    watchdog: Watchdog | None = None
    make_strategy: InitVar[MakePolicy] = field(kw_only=True)
    verbose: bool = field(default=False, init=False)
    strategy: Policy = field(init=False)
    numbers: tuple[int, ...] = field(init=False)
    shrink_group: ShrinkGroup = field(init=False)
    departures: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list, init=False)

    def __post_init__(self, make_strategy: MakePolicy) -> None:
        self.numbers = tuple(range(self.size))
        self.strategy = make_strategy(self)
        self.shrink_group = ShrinkGroup(self)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its host, from 0."""
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self.topology.local_size

    @property
    def node_rank(self) -> int:
        """This host's place among the hosts, from 0."""
        return self.topology.node_rank

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of each rank."""
        return self.topology.hosts

    @property
    def is_root(self) -> bool:
        """True on rank 0."""
        return self.topology.is_root

    @property
    def exchanges(self) -> bool:
        """Whether gradients of this rank go anywhere."""
        return self.strategy.exchanges

    @property
    def activity(self) -> Activity:
        """What this rank is doing, as the watchdog sees it."""
        return self.communicator.activity


@dataclass(eq=False)
class ShrinkGroup:
    """A job and those of its parts that lose ranks together with it: what fails in one fails in all."""

    job: World  # all ranks
    parts: list[World] = field(default_factory=list)  # in which this rank is
    vital: frozenset[int] = frozenset()  # numbers of the ranks that the job cannot go on without


def world_of(
    communicator: Communicator,
    topology: Topology,
    devices: DevicePlan,
    threads: ThreadPlan,
    ranks: Sequence[int] | None = None,
    *,
    faults: FaultOptions | None = None,
    make_strategy: MakePolicy = by_size,
) -> World:
    """Local: the World of these ranks."""
    layout = layout_of(communicator.library, topology)
    agreement = Agreement(communicator, topology.hosts, ranks)
    all_reduce = AllReduce(communicator, layout, os.environ)
    faults = faults or FaultOptions()
    return World(topology, communicator, agreement, all_reduce, devices, threads, faults, make_strategy=make_strategy)
