"""Collectives on tensors and objects, and what they say when ranks do not call the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.collectives.host_engine import DTYPES
from mpitrain.errors import MismatchError
from tests.contracts.engine import value

WORLD = mpitrain.init()
pytestmark = [pytest.mark.mpich, pytest.mark.ranks(1, 2, 3, 4)]
RANKS = range(WORLD.size)
several = pytest.mark.skipif(WORLD.size == 1, reason="there is nobody to differ from")
graph = functools.partial(tf.function, autograph=False)
both_ways = pytest.mark.parametrize("way", [lambda f: f, graph], ids=["eager", "graph"])


def test_mean_of_small_integers_does_not_overflow() -> None:
    assert mpitrain.all_reduce(tf.constant([200, 3], tf.uint8)).numpy().tolist() == [200, 3]


@both_ways
def test_large_buffers(way: Any) -> None:
    result = way(mpitrain.all_reduce)(tf.range(400_000, dtype=tf.float32) * (WORLD.rank + 1.0))
    np.testing.assert_allclose(result, np.arange(400_000) * (WORLD.size + 1) / 2, rtol=1e-6)


@both_ways
def test_gather_broadcast_scatter_all_to_all(way: Any) -> None:
    rank, size = WORLD.rank, WORLD.size

    def gather_and_send(*tensors: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return [(mpitrain.all_gather(rows), mpitrain.broadcast(own, root=size - 1)) for rows, own in pairs]

    own = [value(rank, dtype, shape) for dtype in DTYPES for shape in ((rank, 2), (3,))]
    for dtype, (rows, sent) in zip(DTYPES, way(gather_and_send)(*own), strict=True):
        wanted = tf.concat([value(r, dtype, (r, 2)) for r in RANKS], 0)
        assert bool(tf.reduce_all(rows == wanted))
        assert bool(tf.reduce_all(sent == value(size - 1, dtype, (3,))))
    part = way(functools.partial(mpitrain.reduce_scatter, op="sum"))(tf.range(2 * size + 1, dtype=tf.float32))
    everything = np.concatenate(mpitrain.all_gather_obj(part.numpy()))
    np.testing.assert_array_equal(everything, np.arange(2 * size + 1) * float(size))
    splits = tf.range(size)  # r rows to rank r
    out = tf.repeat(tf.range(size), splits) * 100 + rank
    got, counts = way(mpitrain.all_to_all)(out, splits)
    assert counts.numpy().tolist() == [rank] * size
    assert got.numpy().tolist() == [rank * 100 + r for r in RANKS for _ in range(rank)]
    assert mpitrain.all_gather(tf.constant(rank)).numpy().tolist() == list(RANKS)


def test_objects() -> None:
    rank, size = WORLD.rank, WORLD.size
    assert mpitrain.all_gather_obj({"rank": rank}) == [{"rank": r} for r in RANKS]
    assert mpitrain.broadcast_obj(("from", rank), root=size - 1) == ("from", size - 1)
    assert mpitrain.all_reduce_obj([rank], lambda a, b: a + b) == list(RANKS)
    assert mpitrain.all_to_all_obj([(rank, r) for r in RANKS]) == [(r, rank) for r in RANKS]
    assert mpitrain.reduce_scatter_obj([f"{r}" for r in RANKS], lambda a, b: a + b) == f"{rank}" * size
    mpitrain.barrier()


def test_broadcast_variables() -> None:
    own = [tf.Variable(tf.cast(value(WORLD.rank, d, shape), d)) for d in DTYPES for shape in ((), (0,), (2, 2))]
    mpitrain.broadcast_variables(own, root=WORLD.size - 1)
    mpitrain.verify_replicas(own)
    np.testing.assert_array_equal(own[-1], np.asarray(value(WORLD.size - 1, DTYPES[-1], (2, 2))))


def test_order_in_a_graph_holds_across_branches_and_functions() -> None:
    """Nested functions on different variables are not ordered by TensorFlow itself."""
    variables = [tf.Variable(float(WORLD.rank + 1)) for _ in range(6)]

    def reduce(variable: tf.Variable, shape: int) -> None:
        variable.assign(tf.reduce_sum(mpitrain.all_reduce(tf.fill([shape], variable), "sum")))

    @tf.function
    def step(flag: tf.Tensor) -> None:
        for index, variable in enumerate(variables):
            nested = tf.function(functools.partial(reduce, variable, index + 1))
            if index % 2:
                tf.cond(flag, nested, lambda: None)
            else:
                nested()

    total = WORLD.size * (WORLD.size + 1) / 2
    for _ in range(5):
        for variable in variables:
            variable.assign(float(WORLD.rank + 1))
        step(tf.constant(True))
        assert [float(v) for v in variables] == [total * n for n in range(1, 7)]


def last(one: Any, other: Any) -> Any:
    return other if WORLD.rank == WORLD.size - 1 else one


MISMATCHES = {
    "shape": (lambda: mpitrain.all_reduce(tf.zeros(last([2], [3]))), r"float32\[3\]"),
    "dtype": (lambda: mpitrain.all_reduce(tf.zeros(2, last(tf.float32, tf.float64))), r"float64\[2\]"),
    "op": (lambda: mpitrain.all_reduce(tf.zeros(2), last("sum", "max")), r"all_reduce\(max\)"),
    "kind": (lambda: last(mpitrain.all_gather, mpitrain.broadcast)(tf.zeros(2)), "broadcast from rank 0"),
    "root": (lambda: mpitrain.broadcast(tf.zeros(2), last(0, 1)), "broadcast from rank 1"),
    "columns": (lambda: mpitrain.all_gather(tf.zeros([2, last(2, 3)])), r"float32\[\*, 3\]"),
    "objects": (last(mpitrain.barrier, lambda: mpitrain.all_gather_obj(1)), "all_gather_obj"),
    "variables": (lambda: mpitrain.broadcast_variables([tf.Variable(tf.zeros(last(2, 3)))]), r"float32\[3\]"),
}


@several
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_raises_on_every_rank_and_the_job_goes_on(name: str) -> None:
    call, text = MISMATCHES[name]
    with pytest.raises(MismatchError, match=f"(?s)rank {WORLD.size - 1} .*{text}"):
        call()
    mpitrain.barrier()


@several
def test_mismatch_in_a_graph() -> None:
    with pytest.raises(tf.errors.OpError, match="MismatchError"):
        graph(MISMATCHES["shape"][0])()
    assert float(mpitrain.all_reduce(1.0, "sum")) == WORLD.size


@pytest.mark.parametrize("splits", [[1] * (WORLD.size + 1), [7] * WORLD.size, [-1] * WORLD.size], ids=str)
def test_wrong_splits_on_one_rank_raise_on_all(splits: list[int]) -> None:
    own = last([1] * WORLD.size, splits)
    with pytest.raises(ValueError, match=f"not so on ranks .{WORLD.size - 1}."):
        mpitrain.all_to_all(tf.zeros(WORLD.size), own)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mpitrain.all_reduce(1.0, "average"), "op must be"),
        (lambda: mpitrain.all_reduce(tf.constant("text")), "cannot be exchanged"),
        (lambda: mpitrain.all_reduce(tf.constant(1j), "max"), "complex"),
        (lambda: mpitrain.broadcast(1.0, root=WORLD.size), "root must be"),
    ],
)
def test_wrong_arguments(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.fixture
def small_calls() -> Iterator[None]:
    """MPI takes 40 bytes at a time: what is larger is cut, as it is at a GiB."""
    communicator: Any = WORLD.communicator
    before = getattr(communicator, "largest_bytes", None)
    communicator.largest_bytes = 40
    yield
    communicator.largest_bytes = before


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("rows", [3, 10, 11, 23])
def test_more_bytes_than_one_call_of_mpi_takes(dtype: str, rows: int) -> None:
    def own(rank: int, rows: int = rows) -> Any:
        return (np.arange(3 * rows) % 7 + 10 * rank).reshape(rows, 3).astype(dtype)

    everyone = [own(rank) for rank in RANKS]
    for op, function in (("sum", np.add), ("max", np.maximum)):
        wanted = functools.reduce(function, everyone)
        np.testing.assert_array_equal(mpitrain.all_reduce(own(WORLD.rank), op), wanted)
    root = WORLD.size - 1
    np.testing.assert_array_equal(mpitrain.broadcast(own(WORLD.rank), root), everyone[root])
    mine = own(WORLD.rank, rows + 5 * WORLD.rank)
    np.testing.assert_array_equal(
        mpitrain.all_gather(mine), np.concatenate([own(rank, rows + 5 * rank) for rank in RANKS])
    )
    equal = np.empty((WORLD.size, rows, 3), dtype)
    WORLD.communicator.all_gather(own(WORLD.rank), equal)
    np.testing.assert_array_equal(equal, everyone)
    # One rank sends much to all, the others nothing.
    splits = [rows if WORLD.rank == root else 0] * WORLD.size
    received, counts = mpitrain.all_to_all(own(WORLD.rank, sum(splits)), splits)
    np.testing.assert_array_equal(received, own(root, rows * WORLD.size)[rows * WORLD.rank :][:rows])
    assert counts.numpy().tolist() == [rows if rank == root else 0 for rank in RANKS]
    assert mpitrain.all_gather_obj("x" * rows + str(WORLD.rank)) == ["x" * rows + str(rank) for rank in RANKS]
    assert mpitrain.broadcast_obj("y" * rows, root) == "y" * rows
    if WORLD.size > 1:
        arrived = np.empty((rows, 3), dtype)
        requests = [
            WORLD.communicator.irecv(arrived.reshape(-1), (WORLD.rank - 1) % WORLD.size),
            WORLD.communicator.isend(own(WORLD.rank).reshape(-1), (WORLD.rank + 1) % WORLD.size),
        ]
        while not all(request.test() for request in requests):
            pass
        np.testing.assert_array_equal(arrived, everyone[WORLD.rank - 1])
