"""What is wrong on one rank only, before or within a series of collectives: all ranks are told, and go on in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
import mpitrain.horovod.keras as hvd_keras
import mpitrain.horovod.tensorflow as hvd

world = mpitrain.init()
hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1
pytestmark = [pytest.mark.mpich, pytest.mark.ranks(2, 3)]
TOLD = (ValueError, TypeError, NotImplementedError, tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError)


def init_again(comm: Any = None, process_sets: Any = None) -> None:
    hvd.shutdown()
    hvd.init(comm, process_sets)


def sets(*lists: Any) -> list[Any]:
    return [hvd.ProcessSet(ranks) for ranks in lists]


no_ranks: Any = ["x"]


def unpicklable() -> Any:
    return lambda: None


def communicator(kind: str) -> Any:
    from mpi4py import MPI

    return {"inter": MPI.COMM_NULL, "self": MPI.COMM_SELF, "world": MPI.COMM_WORLD}[kind]


# What the last rank calls, what the others call, and of the message that all get.
WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "init: no list": (lambda: init_again(None, "static"), init_again, "dynamic"),
    "init: no set": (lambda: init_again(None, [[0]]), lambda: init_again(None, sets([0])), "list of ProcessSet"),
    "init: another number": (lambda: init_again(None, sets([0])), init_again, r"numbers of process_sets: \[0"),
    "init: another set": (
        lambda: init_again(None, sets([0], [SIZE - 1])),
        lambda: init_again(None, sets([0], [0])),
        "entry number 1 must be the same",
    ),
    "init: a duplicate": (
        lambda: init_again(None, sets([0], [0])),
        lambda: init_again(None, sets([0], [0])),
        "entry number 1 is a duplicate",
    ),
    "init: no such rank": (
        lambda: init_again(None, sets([0], [SIZE])),
        lambda: init_again(None, sets([0], [SIZE])),
        "different ranks from 0",
    ),
    "init: a part without itself": (
        lambda: init_again([0]),
        lambda: init_again(list(range(SIZE))),
        "gave the ranks",
    ),
    "init: no ranks": (lambda: init_again(["a"]), init_again, "whole numbers"),
    "init: no such rank in a part": (lambda: init_again([RANK, SIZE]), lambda: init_again([RANK]), "gave the ranks"),
    "init: no communicator": (
        lambda: init_again(None, sets(communicator("inter"))),
        lambda: init_again(None, sets(communicator("self"))),
        "intracommunicator",
    ),
    "init: another communicator": (
        lambda: init_again(None, sets(communicator("self"))),
        lambda: init_again(None, sets(communicator("world"))),
        "gave the ranks",
    ),
    "add: no rank": (lambda: hvd.add_process_set(no_ranks), lambda: hvd.add_process_set([0]), "whole numbers"),
    "add: no such rank": (lambda: hvd.add_process_set([SIZE]), lambda: hvd.add_process_set([0]), "different ranks"),
    "add: another set": (
        lambda: hvd.add_process_set([SIZE - 1]),
        lambda: hvd.add_process_set([0]),
        "different collectives",
    ),
    "broadcast_object": (
        lambda: hvd.broadcast_object(unpicklable(), SIZE - 1),
        lambda: hvd.broadcast_object(None, SIZE - 1),
        "cannot be pickled",
    ),
    "allgather_object": (
        lambda: hvd.allgather_object(unpicklable()),
        lambda: hvd.allgather_object(1),
        f"object of rank {SIZE - 1} .*cannot be pickled",
    ),
    "all_gather_obj": (
        lambda: mpitrain.all_gather_obj(unpicklable()),
        lambda: mpitrain.all_gather_obj(1),
        "cannot be pickled",
    ),
    "logs of other names": (
        lambda: averaged({"a": 1.0, "c": 2.0}),
        lambda: averaged({"a": 1.0, "b": 2.0}),
        "named 'a, b'",
    ),
}


def averaged(logs: dict[str, float]) -> None:
    hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_are_told(name: str) -> None:
    last, others, text = WRONG[name]
    with pytest.raises((*TOLD, mpitrain.errors.MismatchError), match=f"(?s){text}"):
        (last if LAST else others)()
    if not hvd.is_initialized() or hvd.size() != SIZE or len(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) > 1:
        hvd.shutdown()
    hvd.init()
    assert int(hvd.allreduce(1, op=hvd.Sum)) == SIZE


# One item of a group is wrong on the last rank: nothing of the group is exchanged, so the next collective there meets
# the group's first of the others, and all are told.
GROUPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "allreduce": (hvd.grouped_allreduce, [1.0, "text"]),
    "allgather": (hvd.grouped_allgather, [1.0, "text"]),
    "reducescatter": (hvd.grouped_reducescatter, [tf.zeros([SIZE]), 1.0]),
    "variables": (lambda items: hvd.broadcast_(items, 0), [tf.Variable(1.0), 1.0]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_looked_at_before_their_first(name: str) -> None:
    call, items = GROUPS[name]
    if LAST:
        with pytest.raises(TOLD):
            call(items)
    with pytest.raises(tf.errors.FailedPreconditionError, match="different collectives"):
        hvd.allreduce(tf.zeros([5])) if LAST else call([items[0]] * 2)


@pytest.mark.ranks(2)
def test_a_variable_without_a_value_is_found_before_any_is_sent() -> None:
    class Empty:
        shape, dtype, name = (), tf.float32, "w"

        def numpy(self) -> Any:
            raise NotImplementedError("no value yet")

    weights = [keras.Variable(float(RANK)), keras.Variable(float(RANK))]
    if LAST:
        with pytest.raises(NotImplementedError, match="no value yet"):
            hvd.broadcast_variables([weights[0], Empty()], SIZE - 1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="different collectives"):
        hvd.allreduce(np.zeros(5)) if LAST else hvd.broadcast_variables(weights, SIZE - 1)


def test_removing_is_told() -> None:
    one = hvd.add_process_set([0])
    with pytest.raises(tf.errors.FailedPreconditionError, match="different collectives"):
        hvd.remove_process_set(hvd.global_process_set if LAST else one)
    hvd.shutdown()
    hvd.init()
