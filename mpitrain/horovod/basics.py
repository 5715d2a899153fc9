"""The job as Horovod describes it: ranks, what is built in, and the names of reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from mpitrain.comm import world as worlds
from mpitrain.comm.world import World
from mpitrain.errors import UsageError

Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5
OPERATIONS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}
_initialized: list[World] = []


@dataclass(frozen=True)
class ProcessSet:
    """Ranks that act together; here always all of them.

    Attributes:
        process_set_id: its number.
    """

    process_set_id: int = 0

    @property
    def ranks(self) -> list[int]:
        """Local: the ranks in it."""
        return list(range(size()))

    def size(self) -> int:
        """Local: how many they are."""
        return size()

    def rank(self) -> int:
        """Local: this process's place among them."""
        return rank()

    def included(self) -> bool:
        """Local: whether this process is one of them."""
        return True


global_process_set = ProcessSet()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Collective: start; calling it again changes nothing.

    Raises:
        UsageError: for process sets and communicators other than that of all ranks.
    """
    if comm is not None and comm != []:
        raise UsageError("init(comm=...) is not supported: the job is always that of all ranks")
    if process_sets:
        raise UsageError("process sets are not supported yet: all ranks act together")
    if not _initialized:
        _initialized.append(worlds.init())


def shutdown() -> None:
    """Local: forget that `init` was called; MPI ends with the program."""
    _initialized.clear()


def is_initialized() -> bool:
    """Local: whether `init` was called."""
    return bool(_initialized)


def world() -> World:
    """Local: the job.

    Raises:
        ValueError: `init` was not called.
    """
    if not _initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _initialized[0]


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


gloo_enabled = gloo_built = nccl_built = ddl_built = ccl_built = absent


def cuda_built() -> bool:
    """Local: TensorFlow is built for CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Local: TensorFlow is built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def rank_op(name: str | None = None) -> Any:
    """Local: this rank as a tensor."""
    return tf.constant(rank(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> Any:
    """Local: the local rank as a tensor."""
    return tf.constant(local_rank(), tf.int32, name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Local: the number of ranks as a tensor."""
    return tf.constant(size(), tf.int32, name=name)


def local_size_op(name: str | None = None) -> Any:
    """Local: the number of ranks of this host as a tensor."""
    return tf.constant(local_size(), tf.int32, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Local: 1, since all ranks are in the only process set."""
    return tf.constant(1, tf.int32, name=name)


def check_process_set(process_set: Any) -> None:
    """Local: refuse any set but that of all ranks.

    Raises:
        UsageError: it is another one.
    """
    if process_set is not None and process_set != global_process_set:
        raise UsageError("process sets are not supported yet: leave process_set out")


def operation(op: int | None, average: bool | None, default: int = Average) -> int:
    """Local: the reduction asked for, by `op` or by the older `average`.

    Raises:
        ValueError: by both.
        UsageError: Adasum, or an unknown one.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = op if op is not None else default if average is None else Average if average else Sum
    if chosen not in OPERATIONS:
        raise UsageError("op=Adasum is not supported yet: use Average or Sum" if chosen == Adasum else f"no op {op!r}")
    return chosen
