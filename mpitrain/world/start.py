"""The start of a job: this process finds its place in it once, before TensorFlow looks at the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from mpitrain.comm.communicator import Communicator
from mpitrain.config import options
from mpitrain.errors import AgreedError, TooLateError
from mpitrain.faults import comparison
from mpitrain.faults.exits import Exits
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime import gpus, imports, marks, streams
from mpitrain.runtime.topology import Topology
from mpitrain.world import engine_choice, machine_share, shrink, watch
from mpitrain.world.connection import connect, launcher_of
from mpitrain.world.consensus import run_on_all
from mpitrain.world.end import finish_with
from mpitrain.world.world import World, world_of

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
        verbose: keep TensorFlow's own log messages, and tell which way gradients take, and why.
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

    Example:
        >>> world = mpitrain.init()
        >>> world.rank, world.size  # of one process that no launcher has started
        (0, 1)
    """
    arguments = locals()
    given = {name: arguments[name] for name in options(FaultOptions, "init")}
    asked = device not in ("auto", "all") or share_gpus or (gpu_memory, visible_devices, threads) != (None, None, None)
    _check_in_time(asked, given)
    if _current:
        return _current[0]
    imports.install()
    environ = os.environ
    marks.tell("begun", detail=os.getpid())
    with _start_limit(environ, stall_warning, stall_abort):
        communicator, topology = connect(environ)
        marks.tell("met", topology.rank)
        exits = Exits(topology, communicator.abort, communicator.activity)
        exits.install()  # before the first thing that may fail on this rank alone
        faults = run_on_all(communicator, topology.hosts, lambda: _settings(communicator, environ, given))
        watchdog = watch.start(communicator, topology, faults, environ)  # until then only the limit sees a stall
    if watchdog is not None:
        exits.watch(watchdog)
    _compare(communicator, topology, faults)
    if not verbose:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # as the variables below, read when TensorFlow is loaded
        imports.install(quiet=topology.local_rank > 0)
    plan = run_on_all(
        communicator,
        topology.hosts,
        lambda: machine_share.devices(communicator, topology, device, share_gpus, gpu_memory, visible_devices),
    )
    pools = machine_share.threads(communicator, topology, *(threads or (None, None)))
    environ.update(pools.environment)
    world = world_of(communicator, topology, plan, pools, faults=faults)
    world.watchdog, world.verbose = watchdog, verbose
    shrink.check(world)
    _current.append(world)
    finish_with(exits, world)
    return world


def current_world() -> World:
    """Collective at the first call: the World of this process, made with defaults if need be."""
    return _current[0] if _current else init()


def use(world: World) -> None:
    """Local: from now on `world`, a part of the job, is the current World of this process."""
    _current[:] = [world]


def _check_in_time(asked: bool, given: Mapping[str, object]) -> None:
    """Local: whether what `init` is asked for can still be had.

    Args:
        asked: something of the machine.
        given: options of faults; None where they were not given.

    Raises:
        TooLateError: it cannot.
    """
    if asked and gpus.devices_fixed():
        raise TooLateError(
            "mpitrain.init(device=..., gpu_memory=..., threads=..., ...) came after TensorFlow had looked at "
            "the machine; call it before the first tensor is made, at the top of the script."
        )
    other = _current and any(value not in (None, getattr(_current[0].faults, name)) for name, value in given.items())
    if other or (_current and asked):
        raise TooLateError("mpitrain.init was called before with other settings; give them at its first call.")


def _settings(communicator: Communicator, environ: Mapping[str, str], given: Mapping[str, object]) -> FaultOptions:
    """Local: what is asked for by arguments and variables.

    Raises:
        UsageError: some of it is not understood, or cannot be.
    """
    engine_choice.check(communicator, environ)
    return FaultOptions.of(environ, **given)


def _start_limit(
    environ: Mapping[str, str], warning: float | None, abort: float | None
) -> contextlib.AbstractContextManager[None]:
    """Local: of the time in which all ranks come, where a launcher has started them."""
    if launcher_of(environ) is None:
        return contextlib.nullcontext()
    found = FaultOptions.patience(environ, stall_warning=warning, stall_abort=abort)
    return watch.limit(found.stall_abort, warning_seconds=found.stall_warning)


def _compare(communicator: Communicator, topology: Topology, faults: FaultOptions) -> None:
    """Collective: stop ranks that would not compute the same.

    Raises:
        AgreedError: the same on all ranks, with a table of the differences.
    """
    if communicator.size == 1 or faults.compare_ranks == "ignore":
        return
    # What is done with values that are not finite, all ranks must do together.
    own = {**comparison.program(os.environ, communicator.library), "--non-finite": faults.non_finite}
    own |= {"--on-failure": faults.on_failure, "--min-np": str(faults.min_np)}
    table = comparison.differences(communicator.all_gather_obj(own), topology.hosts)
    if table is None:
        return
    if faults.compare_ranks == "stop":
        raise AgreedError(
            f"{table}\nGive all ranks the same files, packages, arguments and variables. "
            "MPITRAIN_COMPARE_RANKS=warn starts nevertheless."
        )
    if topology.is_root:
        streams.write_stderr(f"mpitrain: warning: {table}\n")
