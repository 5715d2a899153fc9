"""The job as Horovod describes it: ranks, what is built in, and the names of reductions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives.objects import all_found
from mpitrain.horovod import keras2, session_threads, timeline
from mpitrain.horovod.process_sets import (
    DYNAMIC_VARIABLE,
    ERROR_INIT,
    ERROR_UNKNOWN_SET,
    ProcessSet,
    parts_of,
    register,
    table,
    told,
)
from mpitrain.world import groups, start
from mpitrain.world.world import World

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

# Horovod's own numbers.
Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5
session_threads.install()
keras2.install()
OPERATIONS = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Collective: start; calling it again changes nothing but for process sets that are new.

    Args:
        comm: None for all ranks of the job, or the ranks (of `MPI.COMM_WORLD`) or an mpi4py communicator that this
            process belongs to; ranks of different ones are different jobs from then on.
        process_sets: sets to register, or "dynamic" to allow `add_process_set`.

    Raises:
        ValueError: on every rank: one of them is not in its `comm`, or a process set is there twice.
    """
    sets: list[Any] = []

    def look(everyone: World) -> list[int]:
        sets.extend(_sets_of(process_sets))
        return _ranks_of(everyone, comm)

    if table.started:
        if wanted := _sets_of(process_sets):
            register(wanted)
        return
    everyone = start.init(device="all")  # scripts take the GPU of their local rank themselves
    ranks = all_found(lambda: look(everyone), "hvd.init()", world=everyone)
    table.start(_job(everyone, parts_of(ranks, "hvd.init(comm)")))
    timeline.start_from_environment(table.world())
    register(sets)


def _sets_of(process_sets: Any) -> list[Any]:
    """Local: those to register."""
    if not isinstance(process_sets, str):
        return list(process_sets or ())
    if process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of ProcessSet or "dynamic", not {process_sets!r}')
    os.environ[DYNAMIC_VARIABLE] = "1"
    return []


def _ranks_of(everyone: World, comm: Any) -> list[int]:
    """Local: the ranks that `comm` names.

    Raises:
        ValueError: it names none of this job.
    """
    if comm is None or (isinstance(comm, Iterable) and not list(comm)):
        return list(range(everyone.size))
    if not isinstance(comm, Iterable):
        return groups.ranks_of(everyone, comm)
    return ProcessSet(comm).ranks or []


def _job(everyone: World, parts: list[list[int]]) -> World:
    """Collective: the one of these parts that this rank is in."""
    mine = everyone
    for ranks in parts:
        if ranks != list(range(everyone.size)):
            mine = groups.group(everyone, ranks) or mine
    return mine


def shutdown() -> None:
    """Local: forget that `init` was called; MPI ends with the program."""
    timeline.stop()
    table.clear()


def is_initialized() -> bool:
    """Local: whether `init` was called."""
    return table.started


def world() -> World:
    """Local: the job.

    Raises:
        ValueError: `init` was not called.
    """
    return table.world()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Local: write what is exchanged from now on to a file of Chrome's trace format.

    Args:
        file_path: of rank 0; the others put `.rank-N` before its suffix.
        mark_cycles: mark each header too.

    Raises:
        ValueError: `init` was not called.
    """
    timeline.start(table.world(), file_path, mark_cycles)


def stop_timeline() -> None:
    """Local: end the file.

    Raises:
        ValueError: `init` was not called.
    """
    table.world()
    timeline.stop()


def size() -> int:
    """Local: number of ranks."""
    return world().size


def rank() -> int:
    """Local: this rank."""
    return world().rank


def local_size() -> int:
    """Local: ranks on this host."""
    return world().local_size


def local_rank() -> int:
    """Local: this rank's place on its host."""
    return world().local_rank


def cross_size() -> int:
    """Local: hosts that have a rank of this local rank."""
    counts = [world().topology.nodes.count(node) for node in range(world().topology.node_count)]
    return sum(count > local_rank() for count in counts)


def cross_rank() -> int:
    """Local: this host's place among those."""
    counts = [world().topology.nodes.count(node) for node in range(world().node_rank)]
    return sum(count > local_rank() for count in counts)


def is_homogeneous() -> bool:
    """Local: whether all hosts have equally many ranks."""
    nodes = world().topology.nodes
    return len({nodes.count(node) for node in nodes}) == 1


def mpi_threads_supported() -> bool:
    """Local: whether MPI may be called by several threads."""
    world()
    return True


def mpi_enabled() -> bool:
    """Local: MPI carries the messages."""
    return True


def mpi_built() -> bool:
    """Local: MPI carries the messages."""
    return True


def absent() -> bool:
    """Local: what Horovod could be built with, and this is not."""
    return False


gloo_enabled = gloo_built = ddl_built = ccl_built = absent


def nccl_built() -> int:
    """Local: 0, for there is no NCCL."""
    return 0


def cuda_built() -> bool:
    """Local: whether tensors are exchanged on GPUs, which they are not: they pass through the host's memory."""
    return False


def rocm_built() -> bool:
    """Local: as `cuda_built`."""
    return False


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Local: whether TensorFlow sees a GPU."""
    return ext_base_name == "tensorflow" and bool(tf.config.list_physical_devices("GPU"))


def _when_run(value: Callable[[], int], name: str | None) -> Any:
    """Local: a number that a graph asks for when it runs, not when it is made."""
    if tf.executing_eagerly():
        return tf.constant(told(value), tf.int32, name=name)
    result = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def rank_op(name: str | None = None) -> Any:
    """Local: this rank as a tensor."""
    return _when_run(rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Local: the local rank as a tensor."""
    return _when_run(local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Local: the number of ranks of a process set as a tensor."""
    return _when_run(lambda: len(table.ranks_of(process_set_id)), name)


def local_size_op(name: str | None = None) -> Any:
    """Local: the number of ranks of this host as a tensor."""
    return _when_run(local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Local: 1 if this rank is in the process set, 0 if not; below 0 before `init` and for an unknown set."""

    def included() -> int:
        if not table.started:
            return ERROR_INIT
        ranks = table.ids_and_ranks().get(process_set_id)
        return ERROR_UNKNOWN_SET if ranks is None else int(rank() in ranks)

    return _when_run(included, name)


def operation(op: int | None, average: bool | None, default: int = Average) -> int:
    """Local: the reduction asked for, by `op` or by the older `average`.

    Raises:
        ValueError: by both, or an unknown one.
    """
    if op is not None and average is not None:
        raise ValueError("give op or average, not both: op takes the place of average")
    chosen = op if op is not None else default if average is None else Average if average else Sum
    if chosen not in OPERATIONS:
        raise ValueError(f"no reduction {op!r}: give hvd.Average, Sum, Adasum, Min, Max or Product")
    return chosen
